"""Checks messages and turns them into arrays, before the server applies any part of them.

A malformed message raises InvalidRequest, one over a limit LimitExceeded; both name the field. If only one session is
over a limit, only that session is refused: `Open.refusal` says why.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from histospec.protocol import alternatives
from histospec.protocol.aborted import DIGEST, TAIL, Aborted
from histospec.protocol.arrays import FLOAT32, INT32, UINT64
from histospec.protocol.limits import MAX_EPOCH, MAX_NAMESPACE, MAX_PROBLEM, MAX_QUANTILES
from histospec.protocol.refusals import draft_too_long, too_many
from histospec.server.errors import InvalidRequest, LimitExceeded
from histospec.server.rpc.encoded import Undecodable
from histospec.server.settings.config import Config
from histospec.server.stores.interface import LAST_EPOCH, Problem, Record, ResponseBatch
from histospec.server.stores.records import from_message
from histospec.v1 import draft_pb2 as pb

AnyPrompt = tuple[str, str]
"""The namespace and the explicit name of a problem; all problems without a name share one."""


class Open(NamedTuple):
    """A session to open."""

    session: int
    problem: Problem
    prompt: NDArray[np.int32]
    generated: NDArray[np.int32]
    seed: int | None
    position_noise: bool
    refusal: str
    """Why the session cannot be opened; empty if it can."""


class Step(NamedTuple):
    """The tokens that each of B sessions generated."""

    sessions: list[int]
    positions: NDArray[np.int32]
    """[B]"""
    offsets: NDArray[np.int64]
    """[B + 1]: `tokens[offsets[i]:offsets[i + 1]]` belong to session i."""
    tokens: NDArray[np.int32]
    max_tokens: int
    verify_cost: float
    late: int
    """Earlier steps whose answers missed the deadline, as the client saw it."""
    report: "Report | None"
    runners_up: bool
    """Whether the answer has them."""


class Report(NamedTuple):
    """What a worker with a drafter of its own verified for each of B sessions; `Engine.step` checks the values."""

    verified: NDArray[np.int32] | None = None
    """[B]: verified tokens of the session's last draft from this server."""
    model_drafted: NDArray[np.int32] | None = None
    """[B]: verified tokens of the worker's own drafter since the session's last step ..."""
    model_accepted: NDArray[np.int32] | None = None
    """[B]: ... and how many of them were accepted."""

    def of(self, rows: "NDArray[np.int64] | slice") -> "Report":
        """Returns these rows alone."""
        return Report(*(None if counts is None else counts[rows] for counts in self))

    def without_first(self) -> "Report":
        """Returns the report with zeros in its first row."""
        return Report(*(None if counts is None else counts * (np.arange(len(counts)) > 0) for counts in self))


class Close(NamedTuple):
    """A session to close."""

    session: int
    commit: bool
    epoch: int | None
    reward: float | None
    logprobs: bytes
    generated: int
    changes: int
    alternatives: bytes
    aborted: tuple[AnyPrompt, Aborted] | None = None
    """The response that may be continued, of this or another shard."""


class Message(NamedTuple):
    """A whole, checked DraftRequest."""

    sequence: int
    opens: list[Open]
    step: Step | None
    closes: list[Close]


def array(field: str, data: bytes, dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    """Returns `data` as a one-dimensional array that shares its memory."""
    if len(data) % dtype.itemsize:
        raise InvalidRequest(f"{field}: {len(data)} bytes are not a whole number of {dtype.name} values")
    return np.frombuffer(data, dtype)


def token_array(field: str, data: bytes) -> NDArray[np.int32]:
    """Returns int32 tokens. Raises InvalidRequest if one is negative."""
    tokens: NDArray[np.int32] = array(field, data, INT32)  # type: ignore[assignment]
    if tokens.size and np.minimum.reduce(tokens) < 0:  # without the Python around `min`
        raise InvalidRequest(f"{field}: token {tokens.min()} at position {tokens.argmin()} is negative")
    return tokens


def namespace(field: str, name: str) -> str:
    """Returns a namespace. Raises InvalidRequest if the name is not allowed."""
    if not name:
        raise InvalidRequest(f"{field}: must not be empty")
    if len(name) > MAX_NAMESPACE:
        raise InvalidRequest(f"{field}: {len(name)} characters are more than the limit of {MAX_NAMESPACE}")
    return name


def problem(
    field: str, request: pb.OpenSession | pb.IngestRequest | pb.HistoryRequest | pb.PredictLengthRequest
) -> tuple[Problem, NDArray[np.int32]]:
    """Returns the problem of a request, and its prompt as tokens."""
    namespace(f"{field}namespace", request.namespace)
    return _problem(field, request.namespace, request)


def _problem(
    field: str,
    run: str,
    request: pb.OpenSession
    | pb.IngestRequest
    | pb.HistoryRequest
    | pb.PredictLengthRequest
    | pb.StoredProblem
    | pb.ExpectedResponse,
) -> tuple[Problem, NDArray[np.int32]]:
    if len(request.problem) > MAX_PROBLEM:
        raise InvalidRequest(f"{field}problem: {len(request.problem)} characters are over the limit of {MAX_PROBLEM}")
    given = request.prompt  # each reading copies it
    prompt = token_array(f"{field}prompt", given)
    if not prompt.size:
        raise InvalidRequest(f"{field}prompt: must not be empty")
    return Problem(run, given, request.problem), prompt


def message(request: pb.DraftRequest | Undecodable, config: Config) -> Message:
    """Returns a DraftRequest as a Message, after checking each part alone and against the others."""
    if isinstance(request, Undecodable):
        request.refuse()
    _check_number("opens", len(request.opens), config)
    _check_number("closes", len(request.closes), config)
    opens = [_open(f"opens[{i}].", o, config) for i, o in enumerate(request.opens)]
    if _repeated([o.session for o in opens]):
        raise InvalidRequest("opens: a session appears twice")
    closes = [_close(f"closes[{i}].", c) for i, c in enumerate(request.closes)]
    if _repeated([c.session for c in closes]):
        raise InvalidRequest("closes: a session appears twice")
    return Message(request.sequence, opens, _step(request.step, config) if request.HasField("step") else None, closes)


def _repeated(sessions: Sequence[int] | NDArray[np.generic]) -> bool:
    """Sorts, because the time of a set depends on which numbers a client chooses (see `open_sessions.SECRET`)."""
    if len(sessions) < 2:
        return False
    ordered = np.sort(np.asarray(sessions, UINT64))
    return bool((ordered[1:] == ordered[:-1]).any())


def _open(field: str, request: pb.OpenSession, config: Config) -> Open:
    who, prompt = problem(field, request)
    generated = token_array(f"{field}generated", request.generated)
    refusal = ""
    if prompt.size > config.max_prompt_tokens:
        refusal = f"{field}prompt: {prompt.size} tokens are more than the limit of {config.max_prompt_tokens}"
    elif generated.size > config.max_session_tokens:
        refusal = f"{field}generated: {generated.size} tokens are more than the limit of {config.max_session_tokens}"
    return Open(request.session, who, prompt, generated, _seed(request), request.position_noise, refusal)


def _seed(request: pb.OpenSession | pb.Response) -> int | None:
    """Returns the seed, which may be any int64, or None."""
    return request.seed if request.HasField("seed") else None


def _step(request: pb.Step, config: Config) -> Step:
    given = array("step.sessions", request.sessions, UINT64)
    sessions = given.tolist()
    _check_number("step.sessions", len(sessions), config)
    if _repeated(given):
        raise InvalidRequest("step.sessions: a session appears twice")
    positions = _counts("step.positions", request.positions, len(sessions))
    lengths = _counts("step.lengths", request.lengths, len(sessions))
    tokens = token_array("step.tokens", request.tokens)
    offsets = np.zeros(len(sessions) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] != tokens.size:
        raise InvalidRequest(f"step.lengths: they sum to {offsets[-1]}, but step.tokens has {tokens.size} tokens")
    if request.max_tokens > config.max_draft_tokens:
        raise LimitExceeded(draft_too_long(request.max_tokens, config.max_draft_tokens))
    if not math.isfinite(request.verify_cost) or request.verify_cost < 0:
        raise InvalidRequest(f"step.verify_cost: {request.verify_cost} must be a finite number of at least 0")
    report = _report(request, len(sessions))
    return Step(
        sessions, positions, offsets, tokens, request.max_tokens, request.verify_cost, request.late, report,
        request.runners_up,
    )  # fmt: skip


def _report(request: pb.Step, sessions: int) -> Report | None:
    given = {name: data for name in Report._fields if (data := getattr(request, name))}
    if not given:
        return None
    return Report(**{name: _counts(f"step.{name}", data, sessions) for name, data in given.items()})


def _counts(field: str, data: bytes, sessions: int) -> NDArray[np.int32]:
    """Returns int32[B]. Raises InvalidRequest if a value is negative."""
    counts: NDArray[np.int32] = array(field, data, INT32)  # type: ignore[assignment]
    if counts.size != sessions:
        raise InvalidRequest(f"{field}: {counts.size} values for {sessions} sessions")
    if counts.size and np.minimum.reduce(counts) < 0:
        raise InvalidRequest(f"{field}: {counts.min()} at position {counts.argmin()} is negative")
    return counts


def _close(field: str, request: pb.CloseSession) -> Close:
    _check_reward(f"{field}reward", request.reward)
    if request.commit:
        _check_weights(field, request, request.generated)
    return Close(
        request.session,
        request.commit,
        epoch(f"{field}epoch", request.epoch) if request.HasField("epoch") else None,
        request.reward if request.HasField("reward") else None,
        request.logprobs,
        request.generated,
        request.changes,
        request.alternatives,
        _aborted(f"{field}aborted", request.aborted) if request.HasField("aborted") else None,
    )


def _aborted(field: str, request: pb.AbortedResponse) -> tuple[AnyPrompt, Aborted]:
    name = namespace(f"{field}.namespace", request.namespace)
    if len(request.problem) > MAX_PROBLEM:
        raise InvalidRequest(f"{field}.problem: {len(request.problem)} characters are over the limit of {MAX_PROBLEM}")
    if not 0 < request.prompt <= request.anchor:
        raise InvalidRequest(
            f"{field}.anchor: {request.anchor} must be at least {field}.prompt, {request.prompt}, from 1"
        )
    if len(request.digest) != DIGEST:
        raise InvalidRequest(f"{field}.digest: {len(request.digest)} bytes, must be {DIGEST}")
    tail = token_array(f"{field}.tail", request.tail).size
    if not 0 < tail <= TAIL:
        raise InvalidRequest(f"{field}.tail: {tail} tokens, must be 1 to {TAIL}")
    return (name, request.problem), Aborted(request.prompt, request.anchor, request.digest, request.tail)


def ingest(request: pb.IngestRequest, config: Config, newest_epoch: int) -> tuple[ResponseBatch, NDArray[np.int32]]:
    """Returns the batch of an IngestRequest, and the prompt as tokens."""
    who, prompt = problem("", request)
    _check_prompt("prompt", prompt, config)
    _check_number("responses", len(request.responses), config)
    counted = min(newest_epoch, LAST_EPOCH)  # a counted epoch may be larger
    at = epoch("epoch", request.epoch) if request.HasField("epoch") else counted
    records = [_record(f"responses[{i}].", response, at, config) for i, response in enumerate(request.responses)]
    return ResponseBatch(who, records), prompt


def imported(request: pb.ImportRequest, config: Config) -> list[tuple[Problem, list[Record]]]:
    """Returns the problems of an ImportRequest."""
    namespace("namespace", request.namespace)
    _check_number("problems", len(request.problems), config)
    return [_imported(f"problems[{i}].", p, request.namespace, config) for i, p in enumerate(request.problems)]


def _imported(field: str, problem: pb.StoredProblem, run: str, config: Config) -> tuple[Problem, list[Record]]:
    who, prompt = _problem(field, run, problem)
    _check_prompt(f"{field}prompt", prompt, config)
    _check_number(f"{field}responses", len(problem.responses), config)
    records = []
    for i, response in enumerate(problem.responses):
        place = f"{field}responses[{i}]."
        records.append(_record(place, response, epoch(f"{place}epoch", response.epoch), config))
    return who, records


def _record(field: str, response: pb.Response, epoch: int, config: Config) -> Record:
    tokens = token_array(f"{field}tokens", response.tokens)
    if not tokens.size:
        raise InvalidRequest(f"{field}tokens: must not be empty")
    if tokens.size > config.max_session_tokens:
        raise LimitExceeded(f"{field}tokens: {tokens.size} are more than the limit of {config.max_session_tokens}")
    if _per_token(f"{field}generated", response.generated, np.dtype(np.uint8), tokens.size).max(initial=0) > 1:
        raise InvalidRequest(f"{field}generated: each value must be 0 or 1")
    _check_reward(f"{field}reward", response.reward)
    _check_weights(field, response, tokens.size)
    return from_message(response)._replace(epoch=epoch)


def _check_weights(field: str, message: pb.Response | pb.CloseSession, tokens: int) -> None:
    if (wrong := np.isnan(_per_token(f"{field}logprobs", message.logprobs, FLOAT32, tokens))).any():
        raise InvalidRequest(f"{field}logprobs: value {wrong.argmax()} is not a number")
    if fault := alternatives.fault(message.alternatives, tokens):
        raise InvalidRequest(f"{field}alternatives: {fault}")


def _check_prompt(field: str, prompt: NDArray[np.int32], config: Config) -> None:
    if prompt.size > config.max_prompt_tokens:
        raise LimitExceeded(f"{field}: {prompt.size} tokens are more than the limit of {config.max_prompt_tokens}")


def _check_number(field: str, number: int, config: Config) -> None:
    if number > config.max_batch:
        raise LimitExceeded(too_many(field, number, config.max_batch))


def epoch(field: str, number: int) -> int:
    """Returns an epoch. Raises InvalidRequest if it is not allowed."""
    if number < 0:
        raise InvalidRequest(f"{field}: {number} is negative")
    if number > MAX_EPOCH:
        raise InvalidRequest(f"{field}: {number} is more than the limit of {MAX_EPOCH}")
    return number


def _check_reward(field: str, reward: float) -> None:
    if not math.isfinite(reward):
        raise InvalidRequest(f"{field}: {reward} is not a finite number")


def _per_token(field: str, data: bytes, dtype: np.dtype[Any], tokens: int) -> NDArray[Any]:
    values = array(field, data, dtype)
    if data and values.size != tokens:
        raise InvalidRequest(f"{field}: {values.size} values for {tokens} tokens")
    return values


def expected(request: pb.PredictLengthsRequest, config: Config) -> list[tuple[Problem, NDArray[np.int32], int]]:
    """Returns the problem, the prompt and the generated tokens of each expected response."""
    namespace("namespace", request.namespace)
    _check_number("problems", len(request.problems), config)
    return [
        (*_problem(f"problems[{i}].", request.namespace, one), one.generated) for i, one in enumerate(request.problems)
    ]


def quantiles(request: pb.PredictLengthRequest | pb.PredictLengthsRequest) -> list[float]:
    """Returns the requested quantiles, or the default ones."""
    if len(request.quantiles) > MAX_QUANTILES:
        raise LimitExceeded(f"quantiles: {len(request.quantiles)} are more than the limit of {MAX_QUANTILES}")
    wanted = list(request.quantiles) or [0.1, 0.5, 0.9, 0.99]
    for quantile in wanted:
        if not 0 <= quantile <= 1:
            raise InvalidRequest(f"quantiles: {quantile} must be from 0 to 1")
    return wanted
