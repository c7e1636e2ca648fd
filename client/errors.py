"""The errors that the client raises.

::

    HistoSpecError
    ├── ConfigurationError   a setting is missing or malformed: endpoint, namespace, an address (ValueError)
    ├── InvalidRequest       the server refused an argument that passed the client's own checks (ValueError)
    ├── WrongLoop            an asyncio client is used on another event loop than before (RuntimeError)
    ├── UnknownSession       this client never opened the session, or has closed it (KeyError)
    ├── PermissionDenied     the token is missing, wrong, or bound to another namespace (PermissionError)
    ├── LimitExceeded        the request exceeds a limit of the server
    ├── Unavailable          the server cannot be reached or cannot answer now; a retry may succeed (ConnectionError)
    │   └── DeadlineExceeded the server did not answer in time; it may have carried out the call (TimeoutError)
    └── ServerError          the server failed; its log says why

`step`, `send`, `receive`, `flush` and `finish` raise no error that a server causes: the worker continues without
drafts. A malformed argument raises a plain `ValueError` that names the argument.
"""

import grpc


class HistoSpecError(Exception):
    """Base of the client's own errors."""


class ConfigurationError(HistoSpecError, ValueError):
    """A setting is missing or malformed; the message says what to set."""


class InvalidRequest(HistoSpecError, ValueError):  # noqa: N818 - named as gRPC and the server name it
    """The server refused an argument; a retry of the same call fails again."""


class WrongLoop(HistoSpecError, RuntimeError):  # noqa: N818
    """An asyncio client belongs to the event loop of its first call, and was used on another one."""


class UnknownSession(HistoSpecError, KeyError):  # noqa: N818
    """This client never opened the session, or has closed it."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would add quotes


class PermissionDenied(HistoSpecError, PermissionError):  # noqa: N818
    """The bearer token or the client certificate does not allow the call."""


class LimitExceeded(HistoSpecError):  # noqa: N818
    """The request exceeds a limit of the server, or the server's store is full."""


class Unavailable(HistoSpecError, ConnectionError):  # noqa: N818
    """The server cannot be reached or cannot answer now."""


class DeadlineExceeded(Unavailable, TimeoutError):  # noqa: N818
    """The server did not answer in time; it may or may not have carried out the call."""


class ServerError(HistoSpecError):
    """The server failed; its log says why."""


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
    """Returns the error for a call that ended with `code`; `what` names the call and the shard."""
    return _CLASSES.get(code, ServerError)(f"{what}: {printable(details or code.name)}")


def printable(text: str) -> str:
    """Returns a server's text without control characters, which could write to a terminal or forge lines of a log."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
