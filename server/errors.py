"""What can go wrong, and what a caller is told.

::

    HistoSpecError
    ├── ConfigError          the process cannot start as configured (exit code 2)
    ├── InvalidRequest       a request is malformed: the caller must change it
    ├── LimitExceeded        a request is larger than this server takes
    ├── Unauthenticated      the caller has shown no token that is known
    ├── PermissionDenied     ... or one that is not good for this
    ├── Unavailable          not now: loading or draining; the same request may succeed later
    └── StoreError           the store could not do it
        ├── StoreFull        ... because there is no room left
        ├── StoreOpening     ... because it is not open yet: the same request may succeed later
        └── Damaged          ... because what is stored there is not what was written

Every message names the field, flag or file that it is about.
"""

import grpc


class HistoSpecError(Exception):
    """Base of all errors that the server raises on purpose."""


class ConfigError(HistoSpecError):
    """The process cannot start as configured; the message is one sentence that says what to change."""


class InvalidRequest(HistoSpecError):  # noqa: N818 - named for what it is, as gRPC does
    """A request is malformed; sending it again unchanged cannot succeed."""


class LimitExceeded(HistoSpecError):  # noqa: N818
    """A request is larger than a configured limit."""


class Unauthenticated(HistoSpecError):  # noqa: N818
    """The call came without a token that this server knows."""


class PermissionDenied(HistoSpecError):  # noqa: N818
    """The token is not good for this namespace, or not for this kind of call."""


class Unavailable(HistoSpecError):  # noqa: N818
    """The server cannot do this now, and may be able to later."""


class StoreError(HistoSpecError):
    """The store failed; nothing of the request was kept."""


class StoreFull(StoreError):  # noqa: N818
    """The store has no room left, on disk or in its queue."""


class StoreOpening(StoreError):  # noqa: N818
    """The store is not open yet; the same request may succeed later."""


class Damaged(StoreError):  # noqa: N818
    """What is stored is not what was written."""


# The most specific class wins, so the order of the table does not matter.
STATUS: dict[type[HistoSpecError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    LimitExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    StoreError: grpc.StatusCode.UNAVAILABLE,
    StoreFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


def status_of(error: HistoSpecError) -> grpc.StatusCode:
    """The gRPC status that reports `error`: that of its most specific class in the table."""
    for cls in type(error).__mro__:
        if cls in STATUS:
            return STATUS[cls]
    return grpc.StatusCode.INTERNAL
