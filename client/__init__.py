"""The client of the HistoSpec draft server, for trainers and inference engines.

::

    from histospec.client import DraftClient, Response

    with DraftClient("host:6378", namespace="run-1") as client:
        client.ingest(prompt, [Response(tokens)], epoch=3)
        sessions = client.open([prompt])
        drafts = client.step(sessions, [new_tokens])
        client.finish(sessions, commit=True)

It needs only numpy and gRPC. Importing it configures no logging, starts no threads and opens no connections.
"""

from typing import TYPE_CHECKING

import histospec.client.quiet_grpc  # noqa: F401 - before all others
from histospec.client.aio import AsyncDraftClient
from histospec.client.config import Breaker, Limits, Timeouts, Tls
from histospec.client.core.step import Pending
from histospec.client.errors import (
    ConfigurationError,
    DeadlineExceeded,
    HistoSpecError,
    InvalidRequest,
    LimitExceeded,
    PermissionDenied,
    ServerError,
    Unavailable,
    UnknownSession,
    WrongLoop,
)
from histospec.client.sync import DraftClient
from histospec.client.values import (
    Draft,
    Inspection,
    LengthPrediction,
    NamespaceFacts,
    Response,
    Shard,
    ShardStats,
    SharedPrompts,
    Stats,
)

__all__ = [
    "AsyncDraftClient",
    "Breaker",
    "ConfigurationError",
    "DeadlineExceeded",
    "Draft",
    "DraftClient",
    "HistoSpecError",
    "Inspection",
    "InvalidRequest",
    "LengthPrediction",
    "LimitExceeded",
    "Limits",
    "NamespaceFacts",
    "Pending",
    "PermissionDenied",
    "Response",
    "ServerError",
    "Shard",
    "ShardStats",
    "SharedPrompts",
    "Stats",
    "Timeouts",
    "Tls",
    "Unavailable",
    "UnknownSession",
    "WrongLoop",
    "__version__",
]

__version__: str
"""Version of the installed package."""

if not TYPE_CHECKING:  # with __getattr__, a type checker would accept any name in this module

    def __getattr__(name: str) -> str:
        if name == "__version__":
            from importlib.metadata import PackageNotFoundError, version

            try:
                return version("histospec")
            except PackageNotFoundError:
                raise AttributeError("__version__: histospec is not installed as a package") from None
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
