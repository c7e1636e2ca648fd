"""Reads the answers to single calls, and checks them against what was asked.

A server of another version, or another program at its address, may answer anything. An answer that cannot be true
raises GarbledReply, which callers see as ServerError. The answers of a Draft stream are checked in `core/step.py`.
"""

import math
from collections.abc import Callable, Sequence, Sized
from typing import Any, TypeVar

import numpy as np

from histospec.client import values
from histospec.client.config import is_address
from histospec.client.core.outage_log import short
from histospec.client.core.step import GarbledReply, array
from histospec.client.errors import ServerError
from histospec.protocol import alternatives
from histospec.protocol.arrays import FLOAT32, INT32
from histospec.v1 import draft_pb2 as pb

T = TypeVar("T")

MAX_SHARDS = 4096
"""Shards of a service: to find the owner of a problem takes time for each."""
LAST_SECOND = 253402300800.0
"""The Unix time at which the year 10000 begins, which no text shows."""
MOST_NAMESPACES = 8
"""Namespaces in each list of an Inspect, as the protocol says."""


def read(what: str, reader: Callable[[Any, Any], T], request: Any, answer: Any) -> T:
    """Returns what a reader of this module makes of an answer. Raises ServerError naming the call, `what`."""
    try:
        return reader(request, answer)
    except GarbledReply as error:
        raise ServerError(f"{what}: garbled answer: {error}") from None


def count(_request: Any, answer: Any) -> int:
    """Returns how many responses a call has stored or deleted."""
    return int(answer.responses)


def history(request: pb.HistoryRequest, answer: pb.HistoryResponse) -> list[values.Response]:
    """Returns the responses of a problem."""
    if request.limit and len(answer.responses) > request.limit:
        raise GarbledReply(f"responses: {len(answer.responses)}, at most {request.limit} were asked for")
    return [_response(f"responses[{i}]", r) for i, r in enumerate(answer.responses)]


def _response(name: str, r: pb.Response) -> values.Response:
    tokens = array(f"{name}.tokens", r.tokens, INT32)
    logprobs = array(f"{name}.logprobs", r.logprobs, FLOAT32)
    count = len(tokens)
    if not count or tokens.min() < 0:
        raise GarbledReply(f"{name}.tokens: {tokens.min() if count else 'none'}; each must be at least 0")
    for field, number in (("logprobs", len(logprobs)), ("generated", len(r.generated))):
        if number not in (0, count):
            raise GarbledReply(f"{name}.{field}: {number} values for {count} tokens")
    if r.epoch < 0 or not math.isfinite(r.reward):
        raise GarbledReply(f"{name}: epoch {r.epoch} and reward {r.reward}")
    if wrong := alternatives.fault(r.alternatives, count):
        raise GarbledReply(f"{name}.alternatives: {wrong}")
    return values.Response(
        tokens=tokens,
        logprobs=logprobs if r.logprobs else None,
        reward=r.reward if r.HasField("reward") else None,
        epoch=r.epoch,
        generated=np.frombuffer(r.generated, np.uint8) != 0 if r.generated else None,
        seed=r.seed if r.HasField("seed") else None,
        alternatives=r.alternatives or None,
    )


def prediction(request: pb.PredictLengthRequest, answer: pb.PredictLengthResponse) -> values.LengthPrediction:
    """Returns the quantiles of a length."""
    _check_number("quantiles", answer.quantiles, request.quantiles or answer.quantiles)
    return _prediction(answer, answer.quantiles)


def predictions(request: pb.PredictLengthsRequest, answer: pb.PredictLengthsResponse) -> list[values.LengthPrediction]:
    """Returns the quantiles of the lengths for several problems."""
    _check_number("quantiles", answer.quantiles, request.quantiles or answer.quantiles)
    _check_number("predictions", answer.predictions, request.problems)
    return [_prediction(one, answer.quantiles) for one in answer.predictions]


def _check_number(field: str, given: Sized, asked: Sized) -> None:
    if len(given) != len(asked):
        raise GarbledReply(f"{field}: {len(given)}, and {len(asked)} were asked for")


def _prediction(answer: pb.PredictLengthResponse, quantiles: Sequence[float]) -> values.LengthPrediction:
    of, lengths = np.array(quantiles, np.float64), np.array(answer.lengths, np.float64)
    if len(lengths) not in (0, len(of)):
        raise GarbledReply(f"lengths: {len(lengths)} for {len(of)} quantiles")
    if not (np.isfinite(lengths).all() and (lengths >= 0).all() and ((of >= 0) & (of <= 1)).all()):
        raise GarbledReply(f"lengths: {values.brief(lengths)} at the quantiles {values.brief(of)}")
    return values.LengthPrediction(of, lengths, answer.observations)


def topology(_request: pb.TopologyRequest, answer: pb.TopologyResponse) -> list[pb.Shard]:
    """Returns the shards of a service."""
    if len(answer.shards) > MAX_SHARDS:
        raise GarbledReply(f"shards: {len(answer.shards)} are more than the limit of {MAX_SHARDS}")
    for i, shard in enumerate(answer.shards):
        wrong = not shard.name or short(shard.name) != shard.name
        if wrong or not (shard.listening or is_address(shard.address)):
            raise GarbledReply(f"shards[{i}]: {short(shard.name)!r} at {short(shard.address)!r}")
    return list(answer.shards)


def shards(request: pb.TopologyRequest, answer: pb.TopologyResponse) -> list[values.Shard]:
    """Returns the shards of a service as values."""
    return [values.Shard(s.name, s.address) for s in topology(request, answer)]


def inspection(_request: pb.InspectRequest, answer: pb.InspectResponse) -> values.Inspection:
    """Returns the facts about a shard and a namespace."""
    for field in (answer.similar, answer.shared):
        if len(field) > MOST_NAMESPACES:
            raise GarbledReply(f"{len(field)} other namespaces, at most {MOST_NAMESPACES} were asked for")
    if not 0 <= answer.time < LAST_SECOND:
        raise GarbledReply(f"time: {answer.time}")
    facts = answer.facts
    return values.Inspection(
        shard=short(answer.shard),
        version=short(answer.version),
        time=answer.time,
        limits={field.name: number for field, number in answer.limits.ListFields()},
        rights=tuple(map(short, answer.rights)),
        namespace=values.NamespaceFacts(**{field.name: getattr(facts, field.name) for field in facts.DESCRIPTOR.fields})
        if answer.HasField("facts")
        else None,
        similar=tuple(map(short, answer.similar)),
        shared=tuple(values.SharedPrompts(short(s.namespace), s.prompts, s.asked) for s in answer.shared),
        loaded=answer.loaded,
        trouble=short(answer.trouble),
    )
