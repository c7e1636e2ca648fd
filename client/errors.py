"""What can go wrong, and who has to do something about it.

::

    HistoSpecError
    ├── ConfigurationError   the client cannot work as configured: no endpoint, no namespace, a bad address (ValueError)
    ├── InvalidRequest       the server refused an argument that passed the client's own checks (ValueError)
    ├── UnknownSession       a session that this client never opened, or has closed already (KeyError)
    ├── PermissionDenied     no token, a wrong one, or one that is bound to another namespace (PermissionError)
    ├── LimitExceeded        the request is larger than the server takes
    ├── Unavailable          the server cannot be reached or cannot answer now; the same call may succeed later
    │   │                                                                                          (ConnectionError)
    │   └── DeadlineExceeded it did not answer in time; whether it did what was asked is not known (TimeoutError)
    └── ServerError          the server failed in a way that only its log explains

`step`, `send`, `receive`, `flush` and `finish` raise none of those that a server causes: a worker goes on without
drafts. What is wrong with the caller's own arguments is a plain `ValueError` that names the argument.
"""

import grpc


class HistoSpecError(Exception):
    """Base of all errors that the client raises on purpose."""


class ConfigurationError(HistoSpecError, ValueError):
    """The client cannot work as configured; the message says what to set."""


class InvalidRequest(HistoSpecError, ValueError):  # noqa: N818 - named as gRPC and the server name it
    """The server refused an argument; sending it again unchanged cannot succeed."""


class UnknownSession(HistoSpecError, KeyError):  # noqa: N818
    """The session was never opened by this client, or is closed."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show its quotes


class PermissionDenied(HistoSpecError, PermissionError):  # noqa: N818
    """The bearer token or the client certificate does not allow this."""


class LimitExceeded(HistoSpecError):  # noqa: N818
    """The request is larger than the server takes, or its store is full."""


class Unavailable(HistoSpecError, ConnectionError):  # noqa: N818
    """The server cannot be reached or cannot answer now."""


class DeadlineExceeded(Unavailable, TimeoutError):  # noqa: N818
    """The server did not answer in time; whether it did what was asked is not known."""


class ServerError(HistoSpecError):
    """The server failed in a way that only its log explains."""


_CLASSES: dict[grpc.StatusCode, type[HistoSpecError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: PermissionDenied,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LimitExceeded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.ABORTED: Unavailable,
    grpc.StatusCode.CANCELLED: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
}


def from_status(code: grpc.StatusCode, details: str | None, what: str) -> HistoSpecError:
    """The error for a call that ended with `code`; `what` names the call and the shard."""
    return _CLASSES.get(code, ServerError)(f"{what}: {details or code.name}")
