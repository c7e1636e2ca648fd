"""The errors of the server, and the gRPC status of each. Every message names the field, flag or file at fault."""

import grpc


class HistoSpecError(Exception):
    """Base of all errors that the server raises on purpose."""


class ConfigError(HistoSpecError):
    """The process cannot start as configured; the message says in one sentence what to change."""


class InvalidRequest(HistoSpecError):  # noqa: N818 - named as in gRPC
    """The request is malformed; a retry without changes fails again."""


class LimitExceeded(HistoSpecError):  # noqa: N818
    """The request exceeds a configured limit."""


class Crowded(LimitExceeded):
    """The request would take memory that others need now; a retry may succeed."""


class Late(HistoSpecError):  # noqa: N818
    """The request did not arrive in time."""


class Unauthenticated(HistoSpecError):  # noqa: N818
    """The call has no token that this server knows."""


class PermissionDenied(HistoSpecError):  # noqa: N818
    """The token does not grant this right in this namespace."""


class Unavailable(HistoSpecError):  # noqa: N818
    """The server cannot do this now; a retry may succeed."""


class StoreError(HistoSpecError):
    """The store failed; it kept nothing of the request."""


class StoreFull(StoreError):  # noqa: N818
    """The store has no room left, on disk or in its queue."""


class StoreBusy(StoreFull):
    """The queue of the store has no room left; a retry may succeed."""


class StoreOpening(StoreError):  # noqa: N818
    """The store is not open yet; a retry may succeed."""


class Damaged(StoreError):  # noqa: N818
    """Stored data differs from what was written."""


# status_of() takes the most specific class, so the order of the table does not matter.
STATUS: dict[type[HistoSpecError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    LimitExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Late: grpc.StatusCode.DEADLINE_EXCEEDED,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    StoreError: grpc.StatusCode.UNAVAILABLE,
    StoreFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


def status_of(error: HistoSpecError) -> grpc.StatusCode:
    """Returns the gRPC status for `error`: that of its most specific class in the table."""
    for cls in type(error).__mro__:
        if cls in STATUS:
            return STATUS[cls]
    return grpc.StatusCode.INTERNAL


def reason(error: BaseException) -> str:
    """Returns the operating system's reason for an error."""
    text = error.strerror if isinstance(error, OSError) else None
    return text.lower() if text else str(error)
