"""Exports of raw messages, read without the code of the commands."""

from collections.abc import Iterable
from typing import Any

import grpc

from histospec.server.stores.interface import Problem, Record
from histospec.server.stores.records import from_message
from histospec.v1 import draft_pb2 as pb
from histospec.v1 import draft_pb2_grpc as pb_grpc


def export(stub: pb_grpc.DraftServiceStub, pattern: str = "", token: str | None = None) -> list[pb.ExportResponse]:
    return list(begin(stub, pattern, token))


def begin(stub: pb_grpc.DraftServiceStub, pattern: str = "", token: str | None = None) -> Any:
    """An export whose messages are yet to be read."""
    metadata = None if token is None else (("authorization", f"Bearer {token}"),)
    return stub.Export(pb.ExportRequest(namespaces=pattern), timeout=120, metadata=metadata)


def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    """How a call failed."""
    try:
        list(call)
    except grpc.RpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError("it was not refused")


def problems(messages: Iterable[pb.ExportResponse]) -> dict[Problem, list[Record]]:
    """What an export says that there is; fails where a problem comes twice."""
    found: dict[Problem, list[Record]] = {}
    last: Problem | None = None
    for message in messages:
        for part in message.problems:
            problem = Problem(message.namespace, part.prompt, part.problem)
            assert part.continued == (problem == last), problem
            assert part.continued or problem not in found, problem
            found.setdefault(problem, []).extend(map(from_message, part.responses))
            last = problem
    return found
