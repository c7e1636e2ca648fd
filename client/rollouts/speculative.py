"""SPEC-RL with vLLM: the rollouts of a batch reuse prefixes of old responses.

    history: an old response each -> one pass of vLLM scores them -> accept_prefix -> vLLM generates the rest -> ingest

If the server cannot be reached, a rollout is plain generation.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from histospec.client import arguments
from histospec.client.errors import LimitExceeded, ServerError
from histospec.client.rollouts import sampling
from histospec.client.rollouts.acceptance import Lenience, accept_until_wrong, lenience_of
from histospec.client.rollouts.old import Old, ResponseLimits, choose, cut, not_reused, outside
from histospec.client.rollouts.values import Report, Rollout
from histospec.client.sync import DraftClient
from histospec.client.values import Response, Tokens
from histospec.protocol.arrays import INT32

log = logging.getLogger("histospec.client")

Rewards = Sequence[float | None] | Callable[[Rollout], float | None]
Prompt = Tokens | Mapping[str, Any]


@dataclass(eq=False)
class _Attempt:
    """One rollout in progress."""

    prompt: NDArray[np.int32]
    problem: str | None
    limits: ResponseLimits
    old: Old | None = None
    kept: int = 0
    logprobs: NDArray[np.float32] | None = None
    """Logprobs of the old tokens under the current policy."""

    @property
    def prefix(self) -> NDArray[np.int32]:
        return self.old.tokens[: self.kept] if self.old else np.empty(0, np.int32)

    @property
    def complete(self) -> bool:
        """Returns whether nothing is left to generate."""
        return self.old is not None and self.old.ended and self.kept == len(self.old.tokens)


class SpeculativeRollout:
    """Generates rollouts with vLLM that reuse prefixes of old responses (SPEC-RL, arXiv 2509.23232).

    Unless the policy has not changed, the rollouts are **not** distributed exactly as the current policy's own
    responses, not even with lenience 1: see docs/spec-rl.md.

    Args:
        llm: a vLLM `LLM`. Reset its prefix cache after new weights. With HistoSpec's scheduler it also uses drafts.
        client: a client of the namespace that holds the old responses.
        lenience: how much less likely than before a token may be and still be kept: a number, or a function that
            returns one for an epoch (see `Lenience`). 0 reuses nothing.
        seed: seed of the draws that accept or reject tokens; None: a random one.

    Attributes:
        report: what the last `generate` did; None before the first.
    """

    def __init__(self, llm: Any, client: DraftClient, lenience: Lenience = 1.0, *, seed: int | None = None) -> None:
        if not callable(lenience):
            lenience_of(lenience, None)
        self.llm = llm
        self.client = client
        self.lenience = lenience
        self.report: Report | None = None
        self._random = np.random.default_rng(seed)
        self._calls = 0
        self._foreign_logged = False

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Any,
        *,
        problems: Sequence[str | None] | None = None,
        epoch: int | None = None,
        ingest: bool = True,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
    ) -> list[Rollout]:
        """Generates `sampling_params.n` rollouts for every prompt.

        Args:
            prompts: as for `LLM.generate`: token ids, or {"prompt_token_ids": token ids}. The same prompt may occur
                several times; every old response is used at most once.
            sampling_params: vLLM's SamplingParams. They must not change the model's distribution. With a `seed`, every
                request gets a seed of its own, which differs from call to call.
            problems: None, or for each prompt an explicit problem id or None.
            epoch: version of the current policy; responses of earlier epochs are reused. None: the responses get the
                newest epoch of the namespace, and responses of all epochs are reused.
            ingest: whether the new responses join the history at once. False: call `commit`, which also takes rewards.
            use_tqdm: progress bars, as for `LLM.generate`.
            lora_request: as for `LLM.generate`.

        Returns:
            Rollouts in the order of the prompts, the n rollouts of a prompt one after the other.

        Raises:
            ValueError: an argument is malformed, or sampling_params do not work with reuse; nothing was done.
            PermissionDenied: the server refuses this client.
            InvalidRequest: the server refuses an argument.
        """
        arguments.epoch_number("epoch", epoch)
        lenience = lenience_of(self.lenience, epoch)
        objection = sampling.objection(sampling_params)
        if lenience and objection:
            raise ValueError(objection)
        sampling.check_logprobs(self.llm)
        attempts = self._attempts(prompts, sampling_params, problems)
        report = self.report = Report(lenience, rollouts=len(attempts))
        if lenience:
            with _timed(report, "fetching"):
                self._find_old(attempts, epoch, report)
            with _timed(report, "scoring"):
                self._score(attempts, sampling_params, use_tqdm, lora_request)
                self._accept(attempts, lenience)
        with _timed(report, "generating"):
            ends = self._continue(attempts, sampling_params, epoch, use_tqdm, lora_request)
        with _timed(report, "assembling"):
            rollouts = [_assemble(a, end, epoch, not objection) for a, end in zip(attempts, ends, strict=True)]
            report.tried = sum(a.old is not None for a in attempts)
            report.whole = sum(a.complete for a in attempts)
            report.scored_tokens = sum(len(a.old.tokens) for a in attempts if a.old)
            report.reused_tokens = sum(r.reused for r in rollouts)
            report.generated_tokens = sum(r.generated for r in rollouts)
        if ingest:
            self.commit(rollouts)
        return rollouts

    def commit(self, rollouts: Sequence[Rollout], rewards: Rewards | None = None) -> int:
        """Adds rollouts to the history of their problems, with their logprobs and epochs.

        Args:
            rollouts: from `generate(..., ingest=False)`; once each.
            rewards: one for each rollout, or a function that returns the reward of a rollout; None, or NaN, where there
                is none. Rollouts with a log-probability that is NaN are stored without.

        Returns:
            How many rollouts the server has stored. If it cannot be reached, the others are lost, with a warning.

        Raises:
            ValueError: an argument is malformed; nothing was sent.
        """
        if rewards is not None and not callable(rewards):
            arguments.same_length("rewards", rewards, "rollouts", len(rollouts))
        groups: dict[tuple[bytes, str | None, int | None], list[Response]] = {}
        for i, rollout in enumerate(rollouts):
            given = None if rewards is None else rewards(rollout) if callable(rewards) else rewards[i]
            reward = arguments.known_reward(f"rewards[{i}]", given)
            scores = rollout.logprobs if rollout.trusted else None
            logprobs = arguments.known_logprobs(f"rollouts[{i}].logprobs", scores, len(rollout.tokens))
            if len(rollout.tokens):
                key = (rollout.prompt.tobytes(), rollout.problem, rollout.epoch)
                groups.setdefault(key, []).append(Response(rollout.tokens, logprobs, reward))
        stored = 0
        with _timed(self.report, "ingesting"):
            for epoch in dict.fromkeys(epoch for _, _, epoch in groups):
                mine = [(prompt, problem, g) for (prompt, problem, e), g in groups.items() if e == epoch]
                names, texts = [problem for _, problem, _ in mine], [np.frombuffer(p, np.int32) for p, _, _ in mine]
                responses = [group for _, _, group in mine]
                try:
                    done = self.client.ingest_many(texts, responses, epoch, names)
                except (LimitExceeded, ServerError) as error:
                    log.warning("HistoSpec: responses of this rollout are not stored: %s", error)
                    continue
                stored += sum(len(group) for group, ok in zip(responses, done, strict=True) if ok)
        return stored

    def _attempts(
        self, prompts: Sequence[Prompt], parameters: Any, problems: Sequence[str | None] | None
    ) -> list[_Attempt]:
        arguments.listed("prompts", prompts, arguments.PROMPTS)
        names = arguments.for_each("problems", problems, arguments.PROBLEMS, "prompts", len(prompts))
        stops = sampling.stop_tokens(self.llm, parameters)
        attempts = []
        for i, given in enumerate(prompts):
            text = _token_ids(f"prompts[{i}]", given)
            problem = names[i]
            arguments.problem_name(f"problems[{i}]", problem)
            limits = sampling.limits_of(self.llm, parameters, len(text), stops)
            attempts += [_Attempt(text, problem, limits) for _ in range(parameters.n)]
        return attempts

    def _find_old(self, attempts: Sequence[_Attempt], epoch: int | None, report: Report) -> None:
        """Gives every attempt an old response of its problem, as long as there are any."""
        groups: dict[tuple[str | None, bytes], list[_Attempt]] = {}
        for attempt in attempts:
            groups.setdefault((attempt.problem, attempt.prompt.tobytes()), []).append(attempt)
        members = list(groups.values())
        # Twice as many as needed, because responses that workers commit have no logprobs and are not usable.
        limit = 2 * max(map(len, members), default=1)
        try:
            histories = self.client.histories([m[0].prompt for m in members], [m[0].problem for m in members], limit)
        except (LimitExceeded, ServerError) as error:
            log.warning("HistoSpec: cannot fetch old responses; this rollout is plain generation: %s", error)
            histories = [None] * len(members)
        report.unreachable = sum(history is None for history in histories)
        for group, history in zip(members, histories, strict=True):
            known = self._known(history or (), report)
            for attempt, response in zip(group, choose(known, len(group), epoch), strict=False):
                attempt.old = cut(response, attempt.limits)

    def _known(self, responses: Sequence[Response], report: Report) -> list[Response]:
        """Returns the responses whose tokens the model has; vLLM refuses to score others."""
        vocabulary = sampling.vocabulary(self.llm)
        found = [(response, outside(response, vocabulary)) for response in responses]
        wrong = [token for _, token in found if token is not None]
        report.foreign += len(wrong)
        if wrong and not self._foreign_logged:
            self._foreign_logged = True
            log.warning("HistoSpec: %s", not_reused(wrong[0], vocabulary))
        return [response for response, token in found if token is None]

    def _score(self, attempts: Sequence[_Attempt], parameters: Any, use_tqdm: Any, lora_request: Any) -> None:
        """Scores all old responses with the current policy, in one pass each."""
        pairs = [(a, a.old) for a in attempts if a.old is not None]
        prompts = [_request(np.concatenate([a.prompt, old.tokens])) for a, old in pairs]
        if not prompts:
            return
        score = sampling.to_score(parameters)
        outputs = self.llm.generate(prompts, score, use_tqdm=use_tqdm, lora_request=lora_request)
        for (attempt, _), output in zip(pairs, outputs, strict=True):
            attempt.logprobs = sampling.prompt_logprobs(output, len(attempt.prompt))

    def _accept(self, attempts: Sequence[_Attempt], lenience: float) -> None:
        for a in attempts:
            if a.old is not None:
                uniforms = self._random.random(len(a.old.tokens))
                a.kept = accept_until_wrong(a.logprobs, a.old.logprobs, lenience, uniforms)

    def _continue(
        self, attempts: Sequence[_Attempt], parameters: Any, epoch: int | None, use_tqdm: Any, lora_request: Any
    ) -> list[Any]:
        """Returns vLLM's output for every attempt; None if nothing had to be generated."""
        seeds: list[int | None] = [None] * len(attempts)
        if parameters.seed is not None:
            # With one seed for all, siblings would be equal, and a rejected token would be likely to come again.
            draws = np.random.default_rng([abs(parameters.seed), self._calls])
            seeds = draws.integers(1 << 31, size=len(attempts)).tolist()
        self._calls += 1
        places = [i for i, a in enumerate(attempts) if not a.complete]
        ends: list[Any] = [None] * len(attempts)
        if not places:
            return ends
        todo = [attempts[i] for i in places]
        prompts = [_request(np.concatenate([a.prompt, a.prefix])) for a in todo]
        settings = [
            sampling.to_continue(parameters, a.kept, a.limits.most, seeds[i], a.problem, epoch)
            for i, a in zip(places, todo, strict=True)
        ]
        outputs = self.llm.generate(prompts, settings, use_tqdm=use_tqdm, lora_request=lora_request)
        for i, output in zip(places, outputs, strict=True):
            ends[i] = output
        return ends


def _assemble(attempt: _Attempt, end: Any, epoch: int | None, trusted: bool) -> Rollout:
    text, logprobs = attempt.prefix, np.empty(0, np.float32)
    if attempt.logprobs is not None:
        logprobs = attempt.logprobs[: attempt.kept]
    generated = 0
    if end is None:
        reason = "stop" if int(text[-1]) in attempt.limits.stops else "length"
    else:
        more, scores, reason = sampling.written(end)
        generated = len(more)
        text, logprobs = np.concatenate([text, more]), np.concatenate([logprobs, scores])
    return Rollout(
        tokens=text, logprobs=logprobs, reused=attempt.kept, generated=generated, finish_reason=reason,
        prompt=attempt.prompt, problem=attempt.problem, epoch=epoch,
        old_epoch=attempt.old.epoch if attempt.old else None, trusted=trusted,
    )  # fmt: skip


def _token_ids(name: str, given: Prompt) -> NDArray[np.int32]:
    if isinstance(given, Mapping):
        if set(given) != {"prompt_token_ids"}:
            raise ValueError(f"{name}: must have the key 'prompt_token_ids' alone, has {sorted(given)}")
        given = given["prompt_token_ids"]
    return np.frombuffer(arguments.token_bytes(name, cast("Tokens", given), empty=False), INT32)


def _request(text: NDArray[np.int32]) -> dict[str, Any]:
    return {"prompt_token_ids": text.tolist()}


@contextmanager
def _timed(report: Report | None, what: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        if report is not None:
            name = f"seconds_{what}"
            setattr(report, name, getattr(report, name) + time.perf_counter() - started)
