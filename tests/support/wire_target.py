"""A shard without its network: takes the bytes of messages as gRPC hands them over, and checks what it makes of them.

Either they are refused with one of the server's own errors, or every answer adds up. No session is left, whatever came.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import grpc.aio
import numpy as np

from histospec.native import Engine
from histospec.protocol.names import DRAFT_SERVICE
from histospec.server.errors import HistoSpecError
from histospec.server.history.history import History
from histospec.server.history.tenants import Tenants
from histospec.server.observability.metrics import Metrics
from histospec.server.open_store import open_store
from histospec.server.rpc.answering import Answering
from histospec.server.rpc.connections import Connections
from histospec.server.rpc.encoded import Undecodable, tolerant
from histospec.server.rpc.interceptors import METHODS, checks
from histospec.server.rpc.service import DraftService
from histospec.server.security.access import Access
from histospec.server.settings.config import Config
from histospec.v1 import draft_pb2 as pb

UNARY = ("Ingest", "History", "PredictLength", "PredictLengths", "DropNamespace", "Rewind")
_DECODERS = {name: getattr(pb, method.input_type.name) for name, method in METHODS[DRAFT_SERVICE].items()}

_CHECKS = checks(Config(max_batch=8))


class _Call:
    """A call as the service sees it: what arrives, and what is answered. Each has a caller of its own.

    The streams of one caller would wait for each other after a refusal.
    """

    _numbers = itertools.count()

    def __init__(self, messages: Iterable[pb.DraftRequest | Undecodable] = ()) -> None:
        self._messages = iter(messages)
        self._number = next(self._numbers)
        self.answers: list[pb.DraftResponse] = []

    async def read(self) -> object:
        return next(self._messages, grpc.aio.EOF)  # type: ignore[attr-defined]

    async def write(self, answer: bytes) -> None:
        self.answers.append(pb.DraftResponse.FromString(answer))

    def peer(self) -> str:
        return f"ipv4:fuzzer-{self._number}:1"

    def invocation_metadata(self) -> tuple[()]:
        return ()


class Shard:
    """Engine, store and service with limits so small that they are met. Lives on an asyncio loop of its own."""

    def __init__(self, folder: Path) -> None:
        self._config = Config(
            data_dir=folder, memory=1 << 24, max_batch=8, max_draft_tokens=8, max_prompt_tokens=8,
            max_session_tokens=32, max_namespaces=4, max_sessions_per_stream=6, namespace_tokens=1 << 12,
        )  # fmt: skip
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._start())

    async def _start(self) -> None:
        config = self._config
        self.engine = Engine(config.memory, namespace_tokens=config.namespace_tokens)
        self._history = History(
            self.engine, open_store(config, "shard-0"), config.max_namespaces, Tenants(Access(None), self.engine)
        )
        metrics = Metrics(self.engine, self._history.counts)
        await self._history.load()
        self._service = DraftService(
            self.engine, self._history, metrics, config, Access(None), Answering(Connections(), metrics)
        )

    def forget(self) -> None:
        for namespace in list(self.engine.stats()["namespaces"]):
            self._loop.run_until_complete(self._history.drop(namespace))

    def close(self) -> None:
        self._loop.run_until_complete(self._history.close())
        self._loop.close()

    def unary(self, method: str, data: bytes) -> str:
        """One message to one of UNARY. -> what it was refused for, or ""."""
        request = _decode(method, data)
        try:
            if isinstance(request, Undecodable):
                request.refuse()
            answer = self._loop.run_until_complete(getattr(self._service, method)(request, _Call()))
        except HistoSpecError as error:
            return str(error)
        if method == "Ingest":
            assert answer.responses == len(request.responses)
            assert answer.tokens == sum(len(r.tokens) // 4 for r in request.responses)
        elif method == "History":
            answer = pb.HistoryResponse.FromString(answer)
            assert all(len(_ints(r.tokens)) > 0 and _ints(r.tokens).min() >= 0 for r in answer.responses)
        elif method == "PredictLength":
            assert len(answer.lengths) == (len(answer.quantiles) if answer.observations else 0)
        elif method == "PredictLengths":
            assert len(answer.predictions) == len(request.problems)
            for one in answer.predictions:
                assert len(one.lengths) == (len(answer.quantiles) if one.observations else 0)
        return ""

    def draft(self, messages: Sequence[bytes]) -> str:
        """The messages of one stream. -> what it was refused for, or ""."""
        requests = [_decode("Draft", data) for data in messages]
        call = _Call(requests)
        refusal = ""
        try:
            self._loop.run_until_complete(self._service.Draft(None, cast(Any, call)))
        except HistoSpecError as error:
            refusal = str(error)
        assert self.engine.stats()["sessions"] == 0
        sound = [r for r in requests if not isinstance(r, Undecodable)]
        steps = {r.sequence: len(r.step.sessions) // 8 for r in sound if r.HasField("step")}
        for answer in call.answers:
            self._check(answer, steps)
        answered = Counter(a.sequence for a in call.answers)
        assert answered <= Counter(r.sequence for r in sound)
        if not refusal:
            due = (r.sequence for r in sound if r.HasField("step") or any(c.commit and c.generated for c in r.closes))
            assert Counter(due) <= answered
        return refusal

    def _check(self, answer: pb.DraftResponse, steps: dict[int, int]) -> None:
        lengths, tokens, probs = _ints(answer.lengths), _ints(answer.tokens), np.frombuffer(answer.probs, "<f4")
        assert len(tokens) == len(probs) == lengths.sum()
        assert len(lengths) == 0 or answer.sequence in steps
        assert ((lengths >= 0) & (lengths <= self._config.max_draft_tokens)).all()
        assert (tokens >= 0).all()
        assert ((probs >= 0) & (probs <= 1)).all()
        assert len(answer.unknown) % 8 == 0
        assert all(refusal.reason for refusal in answer.refusals)

    def take(self, data: bytes) -> str:
        """Whatever the bytes stand for: the first is the method, the rest its message; for a stream, see `framed`."""
        method, rest = data[:1], data[1:]
        if method and method[0] < len(UNARY):
            return self.unary(UNARY[method[0]], rest)
        return self.draft(list(_frames(rest)))


def framed(method: str, messages: Sequence[bytes]) -> bytes:
    """The bytes that `Shard.take` takes for these messages: in a stream each comes with its length in two bytes."""
    if method in UNARY:
        return bytes([UNARY.index(method)]) + messages[0]
    return b"\xff" + b"".join(len(m).to_bytes(2, "little") + m for m in messages)


def _frames(data: bytes) -> Iterable[bytes]:
    at = 0
    while at + 2 <= len(data):
        end = at + 2 + int.from_bytes(data[at : at + 2], "little")
        yield data[at + 2 : end]
        at = end


def _decode(method: str, data: bytes) -> Any:
    kind = _DECODERS[method]
    return tolerant(kind.__name__, kind.FromString, _CHECKS[kind.__name__])(data)


def _ints(data: bytes) -> np.ndarray:
    return np.frombuffer(data, "<i4")
