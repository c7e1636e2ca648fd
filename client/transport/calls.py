"""The calls that are not steps, as data: the shard, the request, and how to read the answer.

Each of the two clients carries them out in its own way; nothing here waits.
"""

from __future__ import annotations  # so that help() names types as they are written here

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Generic, TypeVar

from histospec.client import arguments, values
from histospec.client.config import Endpoint, Limits
from histospec.client.core.core import Core
from histospec.client.core.message_limits import PART, MessageLimits
from histospec.client.core.shard import Shard
from histospec.client.core.step import GarbledReply
from histospec.client.errors import Unavailable
from histospec.client.recorder import Recorder
from histospec.client.transport import answers
from histospec.v1 import draft_pb2 as pb

T = TypeVar("T")

MANY = {"Ingest": "responses", "PredictLengths": "problems"}
"""The repeated field at which a method's requests are cut."""


@dataclass(frozen=True)
class Call(Generic[T]):
    """One call to one shard."""

    method: str
    shard: Shard
    request: Any
    timeout: float
    read: Callable[[Any, Any], T]
    """Returns the value of an answer to a request: a function of `answers`."""
    record: Callable[[Any], None] | None = None
    """Records the request after the shard has answered it."""
    join: Callable[[list[T]], T] = lambda parts: parts[-1]
    """Returns the value of the call from the values of the calls that `cut` returned."""

    def finish(self, answer: Any) -> T:
        """Records the request, and returns the value of the answer. Raises ServerError if that cannot be true."""
        if self.record is not None:
            self.record(self.request)
        return answers.read(self.what, self.read, self.request, answer)

    @property
    def endpoint(self) -> Endpoint:
        """The address of the shard. Raises Unavailable if no shard has been found."""
        if not self.shard.endpoint.address:
            raise Unavailable(f"{self.what}: no shard was found there")
        return self.shard.endpoint

    @property
    def what(self) -> str:
        """The method and the shard, for error messages."""
        return f"{self.method} on {self.shard.name}"

    def cut(self, own: Limits) -> list[Call[T]]:
        """Cuts the call into calls within the client's limits and the known limits of the shard."""
        name = MANY.get(self.method)
        if name is None or len(getattr(self.request, name)) < 2:
            return [self]
        limits = MessageLimits.of(own, self.shard.limits)
        head = type(self.request)()
        head.CopyFrom(self.request)
        head.ClearField(name)
        start = size = head.ByteSize()
        groups: list[list[Any]] = [[]]
        for part in getattr(self.request, name):
            more = part.ByteSize() + PART
            if groups[-1] and (size + more > limits.size or len(groups[-1]) >= limits.batch):
                groups.append([])
                size = start
            groups[-1].append(part)
            size += more
        requests = []
        for group in groups:
            request = type(self.request)()
            request.CopyFrom(head)
            getattr(request, name).extend(group)
            requests.append(request)
        return [replace(self, request=request) for request in requests]


def smaller(call: Call[T], details: str, own: Limits) -> list[Call[T]]:
    """Cuts a call that a shard refused without any effect into smaller ones; [] if its size is not the reason."""
    call.shard.lower_limits(details)
    pieces = call.cut(own)
    return pieces if len(pieces) > 1 else []


def ingest(
    core: Core,
    prompt: values.Tokens,
    responses: Sequence[values.Response],
    epoch: int | None = None,
    problem: str | None = None,
    seeds: Sequence[int | None] | None = None,
    *,
    _at: str = "",
) -> list[Call[int]]:
    """Returns calls that add responses, as many as their size needs. `_at` is "[3]" if the problem is one of many."""
    text, name = problem_of(prompt, problem, _at)
    version = arguments.epoch_number("epoch", epoch)
    if isinstance(responses, values.Response):
        raise ValueError(f"responses{_at}: must be a list of responses; got one Response, give [response]")
    arguments.listed(f"responses{_at}", responses, arguments.RESPONSES)
    if seeds is not None:
        arguments.for_each(f"seeds{_at}", seeds, arguments.SEEDS, "responses", len(responses))
        responses = [
            replace(response, seed=drawn) if isinstance(response, values.Response) else response
            for response, drawn in zip(responses, arguments.seed_numbers(f"seeds{_at}", seeds), strict=True)
        ]
    messages = [response_message(f"responses{_at}[{i}]", response) for i, response in enumerate(responses)]
    if not messages:
        return []
    return ingest_calls(
        core,
        pb.IngestRequest(namespace=core.config.namespace, prompt=text, problem=name, epoch=version, responses=messages),
    )


def ingest_calls(core: Core, request: pb.IngestRequest) -> list[Call[int]]:
    """Returns calls for a request, as many as its size needs."""
    shard = core.shard_of(request.prompt, request.problem)
    record = None if core.recorder is None else partial(_record, core.recorder)
    read = partial(_read_ingest, core, shard)
    timeout = core.config.timeouts.ingest
    return Call("Ingest", shard, request, timeout, read, record, join=_total).cut(core.config.limits)


def _read_ingest(core: Core, shard: Shard, request: pb.IngestRequest, answer: pb.IngestResponse) -> int:
    """Returns how many responses the shard keeps."""
    if answer.too_old > len(request.responses):
        raise GarbledReply(f"too_old: {answer.too_old} of {len(request.responses)} responses")
    if answer.too_old:
        core.too_old(shard, answer.too_old)
    return answers.count(request, answer)


def _record(recorder: Recorder, request: pb.IngestRequest) -> None:
    """Records the responses that a shard has stored."""
    epoch = request.epoch if request.HasField("epoch") else None
    for response in request.responses:
        recorder.keep(
            request.prompt,
            response.tokens,
            problem=request.problem,
            epoch=epoch,
            seed=response.seed if response.HasField("seed") else None,
            reward=response.reward if response.HasField("reward") else None,
            generated=response.generated,
        )


def problem_of(prompt: values.Tokens, problem: str | None, at: str = "") -> tuple[bytes, str]:
    """Returns the prompt as bytes and the explicit id of a problem. `at` is "[3]" if it is one of many."""
    plural = f"s{at}" if at else ""
    text = arguments.token_bytes(f"prompt{plural}", prompt, empty=False)
    return text, arguments.problem_name(f"problem{plural}", problem)


def response_message(name: str, response: values.Response) -> pb.Response:
    """Returns a response as a message. Raises ValueError."""
    if not isinstance(response, values.Response):
        raise ValueError(f"{name}: must be a Response, is {arguments.shown(response)}; give Response(tokens)")
    text = arguments.token_bytes(f"{name}.tokens", response.tokens, empty=False)
    size = len(text) // 4
    return pb.Response(
        tokens=text,
        logprobs=arguments.float_bytes(f"{name}.logprobs", response.logprobs, size),
        reward=arguments.reward_number(f"{name}.reward", response.reward),
        generated=arguments.mask_bytes(f"{name}.generated", response.generated, size),
        seed=arguments.seed_number(f"{name}.seed", response.seed),
        alternatives=arguments.alternative_bytes(f"{name}.alternatives", response.alternatives, size),
    )


def history(
    core: Core, prompt: values.Tokens, problem: str | None = None, limit: int | None = None, *, _at: str = ""
) -> list[Call[list[values.Response]]]:
    """Returns a call for the stored responses of a problem."""
    text, name = problem_of(prompt, problem, _at)
    most = 0 if limit is None else arguments.whole("limit", limit, 1, (1 << 32) - 1, "[1, 2^32)")
    request = pb.HistoryRequest(namespace=core.config.namespace, prompt=text, problem=name, limit=most)
    return [Call("History", core.shard_of(text, name), request, core.config.timeouts.call, answers.history)]


def histories(
    core: Core,
    prompts: Sequence[values.Tokens],
    problems: Sequence[str | None] | None = None,
    limit: int | None = None,
) -> list[list[Call[list[values.Response]]]]:
    """Returns `history` for each problem."""
    arguments.listed("prompts", prompts, arguments.PROMPTS)
    names = arguments.for_each("problems", problems, arguments.PROBLEMS, "prompts", len(prompts))
    return [
        history(core, prompt, name, limit, _at=f"[{i}]")
        for i, (prompt, name) in enumerate(zip(prompts, names, strict=True))
    ]


def ingest_many(
    core: Core,
    prompts: Sequence[values.Tokens],
    responses: Sequence[Sequence[values.Response]],
    epoch: int | None = None,
    problems: Sequence[str | None] | None = None,
    seeds: Sequence[Sequence[int | None] | None] | None = None,
) -> list[list[Call[int]]]:
    """Returns `ingest` for each problem."""
    arguments.listed("prompts", prompts, arguments.PROMPTS)
    count = len(prompts)
    arguments.listed("responses", responses, arguments.RESPONSE_LISTS)
    arguments.same_length("responses", responses, "prompts", count)
    names = arguments.for_each("problems", problems, arguments.PROBLEMS, "prompts", count)
    drawn = arguments.for_each("seeds", seeds, arguments.SEED_LISTS, "prompts", count)
    rows = zip(prompts, responses, names, drawn, strict=True)
    return [
        ingest(core, prompt, group, epoch, name, numbers, _at=f"[{i}]")
        for i, (prompt, group, name, numbers) in enumerate(rows)
    ]


def predict_length(
    core: Core,
    prompt: values.Tokens,
    problem: str | None = None,
    generated: int = 0,
    quantiles: Sequence[float] | None = None,
) -> list[Call[values.LengthPrediction]]:
    """Returns a call for quantiles of the length of a response."""
    text, name = problem_of(prompt, problem)
    length = _generated("generated", generated)
    request = pb.PredictLengthRequest(
        namespace=core.config.namespace, prompt=text, problem=name, generated=length, quantiles=_quantiles(quantiles)
    )
    timeout = core.config.timeouts.call
    return [Call("PredictLength", core.shard_of(text, name), request, timeout, answers.prediction)]


@dataclass(frozen=True)
class ByShard(Generic[T]):
    """Calls about many problems, those of a shard together."""

    calls: list[list[Call[list[T]]]]
    """For each shard its calls. The value of a call has an element for each problem."""
    rows: list[list[int]]
    """For each shard the indexes of its problems in the caller's list."""

    def in_order(self, answers: Sequence[list[list[T]] | None]) -> list[T | None]:
        """Returns the values in the caller's order, from the answers of `carry_out`; None where a shard has none."""
        ordered: list[T | None] = [None] * sum(map(len, self.rows))
        for rows, parts in zip(self.rows, answers, strict=True):
            for row, value in zip(rows, chain.from_iterable(parts or ()), strict=False):
                ordered[row] = value
        return ordered


def predict_lengths(
    core: Core,
    prompts: Sequence[values.Tokens],
    problems: Sequence[str | None] | None = None,
    generated: Sequence[int] | None = None,
    quantiles: Sequence[float] | None = None,
) -> ByShard[values.LengthPrediction]:
    """Returns calls for quantiles of the lengths of responses: one for each shard, or as many as their sizes need."""
    arguments.listed("prompts", prompts, arguments.PROMPTS)
    names = arguments.for_each("problems", problems, arguments.PROBLEMS, "prompts", len(prompts))
    lengths = arguments.for_each("generated", generated, arguments.GENERATED, "prompts", len(prompts))
    wanted = _quantiles(quantiles)
    owned: dict[Shard, tuple[list[int], pb.PredictLengthsRequest]] = {}
    for i, (prompt, problem, length) in enumerate(zip(prompts, names, lengths, strict=True)):
        text, name = problem_of(prompt, problem, f"[{i}]")
        begun = 0 if length is None else _generated(f"generated[{i}]", length)
        shard = core.shard_of(text, name)
        if shard not in owned:
            owned[shard] = [], pb.PredictLengthsRequest(namespace=core.config.namespace, quantiles=wanted)
        rows, request = owned[shard]
        rows.append(i)
        request.problems.append(pb.ExpectedResponse(prompt=text, problem=name, generated=begun))
    timeout, limits = core.config.timeouts.call, core.config.limits
    calls = [
        Call("PredictLengths", shard, request, timeout, answers.predictions, join=_joined).cut(limits)
        for shard, (_, request) in owned.items()
    ]
    return ByShard(calls, [rows for rows, _ in owned.values()])


def _generated(name: str, value: int) -> int:
    return arguments.whole(name, value, 0, (1 << 31) - 1, "[0, 2^31)")


def _quantiles(quantiles: Sequence[float] | None) -> list[float]:
    asked: Sequence[float] = () if quantiles is None else quantiles
    arguments.listed("quantiles", asked, arguments.QUANTILES)
    return [arguments.number(f"quantiles[{i}]", quantile, 0, 1) for i, quantile in enumerate(asked)]


def _total(parts: list[int]) -> int:
    return sum(parts)


def _joined(parts: list[list[T]]) -> list[T]:
    return list(chain.from_iterable(parts))


def members(core: Core) -> list[values.Shard]:
    """Returns the shards that discovery found; [] if the configuration names them."""
    found = [shard.endpoint for shard in core.shards if core.config.discover]
    return [values.Shard(e.name, e.address) for e in found if e.address]


def topology(core: Core) -> list[Call[list[values.Shard]]]:
    """Returns a call for the shards that the first shard knows."""
    timeout = core.config.timeouts.call
    return [Call("Topology", core.shards[0], pb.TopologyRequest(), timeout, answers.shards)]


def inspect(core: Core, timeout: float | None = None) -> list[Call[values.Inspection]]:
    """Returns a call to each shard for its state and that of the namespace."""
    request = pb.InspectRequest(namespace=core.config.namespace)
    seconds = core.config.timeouts.call if timeout is None else arguments.seconds("timeout", timeout)
    return [Call("Inspect", shard, request, seconds, answers.inspection) for shard in core.shards]


def rewind(core: Core, epoch: int) -> list[Call[int]]:
    """Returns a call to each shard that forgets what is newer than the epoch."""
    number = arguments.epoch_number("epoch", epoch)
    if number is None:
        raise ValueError("epoch: is None; give the newest epoch that stays")
    request = pb.RewindRequest(namespace=core.config.namespace, epoch=number)
    timeout = core.config.timeouts.call
    return [Call("Rewind", s, request, timeout, answers.count) for s in core.shards]


def drop_namespace(core: Core) -> list[Call[int]]:
    """Returns a call to each shard that forgets the namespace."""
    request = pb.DropNamespaceRequest(namespace=core.config.namespace)
    timeout = core.config.timeouts.call
    return [Call("DropNamespace", s, request, timeout, answers.count) for s in core.shards]
