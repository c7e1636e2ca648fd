"""Samples with seeds and all kinds of drafts, and compares the samples.

Each check runs in a process of its own, with HISTOSPEC_SAMPLING=coupled. `same`: `size` responses of `length` tokens,
without drafts and with good, wrong and random ones, some of the requests without a seed, some greedy. `distribution`:
`size` short responses with seeds and as many without, which take vLLM's own sampler; `z…` is how many standard
deviations their chi-square statistic lies above what one distribution gives. `visits`: three visits of `size` problems,
drafted for by the server that the environment names. `two_drafters`: `size` prompts, twice with the same seeds and once
with others, without drafts, and with drafts of the server and of vLLM's own drafter; its `speculative_config` is
JSON. `alternatives`: three visits of `size` prompts with the server, then what it has stored, against the
log-probabilities of vLLM without drafts.
"""

import itertools
import json
import os
import random

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.sampling_check import PROMPT, wilson_hilferty
from tests.support.told import Told

LENGTH = 200
DRAFTED = 24
PAIRED = 4  # tokens of a response whose distribution is compared


def engine(model: str, **options: Any) -> Any:
    from vllm import LLM

    return LLM(
        model=model, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=256,
        max_num_seqs=128, max_num_batched_tokens=8192, kv_cache_memory_bytes=256 << 20, disable_log_stats=False,
        seed=1, async_scheduling=False, **options,
    )  # fmt: skip


def with_server(model: str, drafted: int) -> Any:
    """An engine with drafts of the server that the environment names, of at most so many tokens."""
    return engine(
        model, speculative_config=proposing(drafted), scheduler_cls="histospec.client.vllm.HistoSpecScheduler"
    )


def proposing(drafted: int) -> dict[str, Any]:
    return {
        "method": "custom_class",
        "model": "histospec.client.vllm.HistoSpecProposer",
        "num_speculative_tokens": drafted,
    }


def drafting(model: str) -> tuple[Any, Any]:
    """An engine whose drafts a test decides on: `drafts.propose(request)`."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import DraftTokenIds

    class Drafts(Scheduler):  # type: ignore[misc]
        propose: Callable[[Any], list[int]]

        def update_draft_token_ids(self, draft_token_ids: Any) -> None:
            requests = [self.requests.get(each) for each in draft_token_ids.req_ids]
            rows = [list(Drafts.propose(request)) if request else [] for request in requests]
            super().update_draft_token_ids(DraftTokenIds(draft_token_ids.req_ids, rows))

    return engine(model, speculative_config=proposing(DRAFTED), scheduler_cls=Drafts), Drafts


def accepted(llm: Any) -> int:
    return sum(m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens")


def same(model: str, size: int, length: int) -> dict[str, int]:
    from vllm import SamplingParams

    rng = random.Random(0)
    prompts = [[rng.randrange(32) for _ in range(rng.randrange(1, 30))] for _ in range(size)]

    def sampling(i: int) -> Any:
        kinds: list[dict[str, float]] = [
            {},
            {"top_p": 0.9},
            {"top_k": 5, "temperature": 0.7},
            {"presence_penalty": 0.5},
            {"logprobs": 2},
        ]
        options = {"temperature": 1.0, "seed": [i, -i - 2, 2**62 + i][i % 3]} | kinds[i % len(kinds)]
        return SamplingParams(max_tokens=length, detokenize=False, extra_args={"i": i}, **options)

    others = [SamplingParams(max_tokens=length, detokenize=False, temperature=t, extra_args={"i": -1}) for t in (0, 1)]

    def roll(llm: Any, count: int = size, extra: bool = True) -> dict[int, list[int]]:
        requests = [({"prompt_token_ids": prompts[i]}, sampling(i)) for i in range(count)]
        if extra:  # in the same batches
            requests += [({"prompt_token_ids": prompts[0]}, other) for other in others for _ in range(4)]
        random.Random(count).shuffle(requests)
        outputs = llm.generate([r[0] for r in requests], [r[1] for r in requests], use_tqdm=False)
        found = zip(requests, outputs, strict=True)
        return {r[1].extra_args["i"]: list(o.outputs[0].token_ids) for r, o in found}

    plain = engine(model)
    truth = roll(plain)
    result = {"tokens": sum(len(truth[i]) for i in range(size)), "distinct": len({str(t) for t in truth.values()})}
    result["again"] = sum(len(t) for i, t in roll(plain, size // 4, extra=False).items() if t == truth[i])
    del plain
    llm, drafts = drafting(model)

    def good(request: Any) -> list[int]:
        i, done = request.sampling_params.extra_args["i"], request.num_output_tokens
        return truth[i][done : done + min(DRAFTED, length - done - 1)]

    def wrong(request: Any) -> list[int]:
        return [(token + 1) % 32 for token in good(request)]

    def mixed(request: Any) -> list[int]:
        draft = good(request)[: rng.randrange(DRAFTED + 1)]
        return [token if rng.random() < 0.9 else rng.randrange(32) for token in draft]

    for name, propose in {"none": lambda request: [], "good": good, "wrong": wrong, "mixed": mixed}.items():
        drafts.propose = staticmethod(propose)
        before = accepted(llm)
        found = roll(llm)
        result[name] = sum(len(found[i]) for i in range(size) if found[i] == truth[i])
        result[f"accepted {name}"] = accepted(llm) - before
    return result


def distribution(model: str, size: int) -> dict[str, float]:
    import numpy as np
    from vllm import SamplingParams

    llm, drafts = drafting(model)
    rng = random.Random(0)
    drafts.propose = staticmethod(lambda request: [rng.randrange(32) for _ in range(rng.randrange(3))])
    each = 500
    result = {}
    for name, options in {"plain": {}, "top_p": {"top_p": 0.8}, "penalty": {"presence_penalty": 1.5}}.items():
        tables = []
        for first in (None, 10**6):
            sampling = [
                SamplingParams(max_tokens=PAIRED, detokenize=False, n=each, seed=first and first + i * each, **options)
                for i in range(size // each)
            ]
            outputs = llm.generate([{"prompt_token_ids": PROMPT}] * len(sampling), sampling, use_tqdm=False)
            tokens = np.array([list(c.token_ids) for output in outputs for c in output.outputs])
            tables.append(
                [np.bincount(tokens[:, i] * 32 + tokens[:, i + 1], minlength=1024) for i in range(PAIRED - 1)]
            )
        for i, (one, other) in enumerate(zip(*tables, strict=True)):
            result[f"z {name} {i}"] = between(one, other)
    return result


def visits(model: str, size: int) -> dict[str, Any]:
    from vllm import SamplingParams

    llm = with_server(model, 64)
    prompts = [{"prompt_token_ids": [i % 32, i // 32, 5]} for i in range(size)]
    found, steps = [], []
    for epoch in range(3):
        before = drafts(llm)
        sampling = SamplingParams(max_tokens=LENGTH, detokenize=False, n=4, extra_args={"histospec": {"epoch": epoch}})
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        found.append([tuple(c.token_ids) for output in outputs for c in output.outputs])
        steps.append(drafts(llm) - before)
    return {
        "responses": len(found[0]),
        "distinct": len(set(found[0])),
        "again": [sum(a == b for a, b in zip(*pair, strict=True)) for pair in itertools.pairwise(found)],
        "drafts": steps,
    }


def two_drafters(model: str, size: int, speculative: str) -> dict[str, int]:
    from vllm import SamplingParams

    def roll(llm: Any, first_seed: int) -> list[list[int]]:
        sampling = [SamplingParams(max_tokens=LENGTH, detokenize=False, seed=first_seed + i) for i in range(size)]
        prompts = [{"prompt_token_ids": [i % 32, i // 32, 5]} for i in range(size)]
        return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, sampling, use_tqdm=False)]

    plain = engine(model)
    seeds = (0, 0, 10**6)
    truth = [roll(plain, seed) for seed in seeds]
    scheduler = "histospec.client.vllm.HistoSpecScheduler"
    llm = engine(model, speculative_config=json.loads(speculative), scheduler_cls=scheduler)
    told = Told(SimpleNamespace(scheduler=llm.llm_engine.engine_core.engine_core.scheduler))
    found = [roll(llm, seed) for seed in seeds]
    pairs = zip(itertools.chain(*truth), itertools.chain(*found), strict=True)
    return {
        "tokens": LENGTH * size * len(seeds),
        "distinct": len({str(text) for text in itertools.chain(*truth)}),
        "same": sum(len(b) for a, b in pairs if a == b),
        "history": told.history,
        "model": told.accepted,
    }


def alternatives(model: str, size: int) -> dict[str, Any]:
    from vllm import SamplingParams

    from histospec.client import DraftClient
    from histospec.protocol.alternatives import LEAST, LEVELS_PER_NAT, unpack

    prompts = [{"prompt_token_ids": [i % 32, i // 32, 5]} for i in range(size)]

    def roll(llm: Any, each: int, epoch: int = 0) -> list[Any]:
        """Asks for the log-probabilities of one request in `each`; more than half of the vocabulary."""
        extra = {"histospec": {"epoch": epoch}}
        sampling = [
            SamplingParams(
                max_tokens=LENGTH, detokenize=False, seed=i, logprobs=None if i % each else 20, extra_args=extra
            )
            for i in range(size)
        ]
        return [output.outputs[0] for output in llm.generate(prompts, sampling, use_tqdm=False)]

    truth = roll(engine(model), 1)
    llm = with_server(model, 16)
    result: dict[str, Any] = {"tokens": 0, "same": 0, "logprobs": 0, "places": 0, "none": 0, "wrong": [], "bytes": 0}
    for epoch in range(3):
        for output, true in zip(roll(llm, 2, epoch), truth, strict=True):
            result["same"] += len(true.token_ids) * (output.token_ids == true.token_ids)
            for found, wanted in zip(output.logprobs or (), true.logprobs, strict=False):
                near = [abs(found[token].logprob - one.logprob) < 1e-4 for token, one in wanted.items()]
                result["logprobs"] += found.keys() == wanted.keys() and all(near)
    result["accepted"] = accepted(llm)
    with DraftClient() as client:
        for prompt, true in zip(prompts, truth, strict=True):
            for response in client.history(prompt["prompt_token_ids"]):
                result["tokens"] += len(response.tokens)
                result["bytes"] += len(response.alternatives or b"")
                places = unpack(response.alternatives or b"", len(response.tokens))
                for i, (place, all_of_it) in enumerate(zip(places, true.logprobs, strict=True)):
                    own = all_of_it[response.tokens[i]].logprob
                    likely = sorted(
                        (-one.logprob, token) for token, one in all_of_it.items() if token != response.tokens[i]
                    )
                    likely = [(token, -minus) for minus, token in likely[:3] if -minus >= np.log(LEAST)]
                    if place is None or not likely:
                        borders = likely and likely[0][1] < np.log(LEAST) + 1e-4
                        result["none"] += place is None
                        if (place is not None or likely) and not borders:
                            result["wrong"].append([i, str(place), likely])
                        continue
                    result["places"] += 1
                    kept = [(-1, place.sampled), *place.others]
                    expected = [(-1, own), *likely]
                    near = [
                        a == b and abs(np.log(p) - log_p) <= 0.51 / LEVELS_PER_NAT
                        for (a, p), (b, log_p) in zip(kept, expected, strict=False)
                    ]
                    if len(kept) != len(expected) or not all(near):
                        result["wrong"].append([i, str(place), own, likely])
    result["wrong"] = result["wrong"][:5]
    return result


def drafts(llm: Any) -> int:
    return sum(m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_drafts")


def between(one: NDArray[np.int64], other: NDArray[np.int64]) -> float:
    """Chi-square of two samples of one size, cells with fewer than ten of both merged, as a standard normal deviate."""
    rare = one + other < 10
    first, second = ([*counts[~rare], counts[rare].sum()] for counts in (one, other))
    chi2 = sum((a - b) ** 2 / (a + b) for a, b in zip(first, second, strict=True) if a + b)
    return float(wilson_hilferty(chi2, len(first) - 1))


CHECKS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (same, distribution, visits, two_drafters, alternatives)
}
