"""Raw connections to a draft service: the generated gRPC stubs, and the arrays of messages as bytes."""

import queue
from collections.abc import Iterable, Sequence
from typing import Any

import grpc
import numpy as np
import pytest

from histospec.v1 import draft_pb2 as pb
from histospec.v1 import draft_pb2_grpc as pb_grpc


def i32(values: Iterable[int] = ()) -> bytes:
    """Little-endian int32, as tokens, lengths and positions travel."""
    return np.array(list(values), "<i4").tobytes()


def u64(values: Iterable[int] = ()) -> bytes:
    """Little-endian uint64, as session ids travel."""
    return np.array(list(values), "<u8").tobytes()


class Stream:
    """A Draft stream of raw messages. Sending and receiving are apart, so that a test may do either first."""

    def __init__(self, stub: pb_grpc.DraftServiceStub, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self._requests: queue.SimpleQueue[pb.DraftRequest | None] = queue.SimpleQueue()
        self._sequence = 0
        self.call: Any = stub.Draft(iter(self._requests.get, None), timeout=600, metadata=metadata)

    def send(self, **fields: Any) -> int:
        """Sends a DraftRequest of these fields; its sequence."""
        self._sequence += 1
        self._requests.put(pb.DraftRequest(sequence=self._sequence, **fields))
        return self._sequence

    def receive(self) -> pb.DraftResponse:
        """The next answer, whichever message it answers."""
        response: pb.DraftResponse = next(self.call)
        return response

    def ask(self, **fields: Any) -> pb.DraftResponse:
        """Sends a request that will be answered, and its answer."""
        sequence = self.send(**fields)
        response = self.receive()
        assert response.sequence == sequence
        return response

    def end(self) -> list[pb.DraftResponse]:
        """Says that nothing more will be sent; what still arrives."""
        self._requests.put(None)
        return list(self.call)

    def cancel(self) -> None:
        """Drops it without a word."""
        self.call.cancel()
        self._requests.put(None)

    def error(self) -> grpc.RpcError:
        """The error that ends the stream."""
        with pytest.raises(grpc.RpcError) as caught:
            list(self.call)
        return caught.value


class Wire:
    """The draft service as the generated stubs show it, and its arrays as bytes."""

    i32 = staticmethod(i32)
    u64 = staticmethod(u64)

    def __init__(self, endpoint: str) -> None:
        quick = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 100)]
        self.channel = grpc.insecure_channel(endpoint, options=quick)
        self.stub = pb_grpc.DraftServiceStub(self.channel)
        self._streams: list[Stream] = []

    def stream(self) -> Stream:
        self._streams.append(Stream(self.stub))
        return self._streams[-1]

    def close(self) -> None:
        for stream in self._streams:
            stream.cancel()
        self.channel.close()

    @staticmethod
    def open(session: int, prompt: Iterable[int] = (1, 2, 3), namespace: str = "run", **fields: Any) -> pb.OpenSession:
        return pb.OpenSession(session=session, namespace=namespace, prompt=i32(prompt), **fields)

    @staticmethod
    def step(
        sessions: Sequence[int],
        tokens: Sequence[Sequence[int]],
        positions: Sequence[int] | None = None,
        max_tokens: int = 16,
        verify_cost: float = 0.05,
    ) -> pb.Step:
        """A Step; positions default to zeros."""
        return pb.Step(
            sessions=u64(sessions),
            positions=i32(positions if positions is not None else [0] * len(sessions)),
            lengths=i32(map(len, tokens)),
            tokens=i32(token for some in tokens for token in some),
            max_tokens=max_tokens,
            verify_cost=verify_cost,
        )

    @staticmethod
    def commit(session: int, generated: int, **fields: Any) -> pb.CloseSession:
        return pb.CloseSession(session=session, commit=True, generated=generated, **fields)

    @staticmethod
    def drafts(response: pb.DraftResponse) -> list[list[int]]:
        tokens, lengths = np.frombuffer(response.tokens, "<i4"), np.frombuffer(response.lengths, "<i4")
        assert len(response.tokens) == len(response.probs)
        return [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])] if len(lengths) else []

    @staticmethod
    def unknown(response: pb.DraftResponse) -> list[int]:
        """The sessions that the server does not hold."""
        sessions: list[int] = np.frombuffer(response.unknown, "<u8").tolist()
        return sessions

    def ingest(
        self, prompt: Iterable[int], responses: Sequence[Iterable[int]], namespace: str = "run", **fields: Any
    ) -> pb.IngestResponse:
        """Ingests responses that are tokens alone."""
        return self.stub.Ingest(
            pb.IngestRequest(
                namespace=namespace,
                prompt=i32(prompt),
                responses=[pb.Response(tokens=i32(r)) for r in responses],
                **fields,
            )
        )

    def history(
        self, prompt: Iterable[int], namespace: str = "run", *, wait: bool = False, **fields: Any
    ) -> list[list[int]]:
        """Tokens of the stored responses, oldest first. `wait`: until the server is there again."""
        request = pb.HistoryRequest(namespace=namespace, prompt=i32(prompt), **fields)
        answer = self.stub.History(request, timeout=60, wait_for_ready=wait)
        return [np.frombuffer(r.tokens, "<i4").tolist() for r in answer.responses]


class Connector:
    """Opens raw connections: `connect(server.endpoint)`."""

    def __init__(self) -> None:
        self._wires: list[Wire] = []

    def __call__(self, endpoint: str) -> Wire:
        self._wires.append(Wire(endpoint))
        return self._wires[-1]

    def close(self) -> None:
        for wire in self._wires:
            wire.close()
