"""A server on a real socket that misbehaves on purpose."""

from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import numpy as np

from histospec.v1 import draft_pb2 as pb

Answer = Callable[[pb.DraftRequest, Any], pb.DraftResponse | bytes | None]


class OddServer:
    """Answers every Draft message with whatever `answer(request, context)` says: a response, raw bytes, or nothing."""

    def __init__(self) -> None:
        self.answer: Answer = self.draft
        self.requests: list[pb.DraftRequest] = []
        self.streams = 0
        self.endpoint = "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        """Listens, after a stop where it did before."""
        self._server = grpc.server(futures.ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)])
        handler = grpc.stream_stream_rpc_method_handler(
            self._serve, pb.DraftRequest.FromString, lambda r: r if isinstance(r, bytes) else r.SerializeToString()
        )
        topology = grpc.unary_unary_rpc_method_handler(
            lambda request, context: pb.TopologyResponse(),  # which tells no limits
            pb.TopologyRequest.FromString,
            pb.TopologyResponse.SerializeToString,
        )
        methods = {"Draft": handler, "Topology": topology}
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("histospec.v1.DraftService", methods)]
        )
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port(self.endpoint)}"
        self._server.start()

    @staticmethod
    def draft(request: pb.DraftRequest, context: Any = None) -> pb.DraftResponse | None:
        """One token a session: its first number."""
        if not (request.HasField("step") or any(c.commit for c in request.closes)):
            return None
        sessions = np.frombuffer(request.step.sessions, "<u8")
        return pb.DraftResponse(
            sequence=request.sequence,
            lengths=np.ones(len(sessions), "<i4").tobytes(),
            tokens=sessions.astype("<i4").tobytes(),
            probs=np.full(len(sessions), 0.5, "<f4").tobytes(),
        )

    def _serve(self, requests: Iterator[pb.DraftRequest], context: Any) -> Iterator[Any]:
        self.streams += 1
        for request in requests:
            self.requests.append(request)
            response = self.answer(request, context)
            if response is not None:
                yield response

    def opened(self) -> list[tuple[int, list[int]]]:
        """Every open so far: the session, and what it had generated."""
        return [(o.session, np.frombuffer(o.generated, "<i4").tolist()) for r in self.requests for o in r.opens]

    def stop(self) -> None:
        self._server.stop(None).wait()
