"""Opens connections to shards, for the streams and for single calls."""

import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import grpc

from histospec.client import quiet_grpc
from histospec.client.config import Config, Endpoint, bearer
from histospec.client.errors import Unavailable
from histospec.client.transport import at_exit
from histospec.client.transport.threads import uninterrupted

_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    # The breaker decides when to connect again, so gRPC's own back-off, which connections share, must not.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.enable_retries", 0),  # an Ingest that may have been stored is not sent twice behind the caller's back
    ("grpc.enable_http_proxy", 0),  # a draft server is near; a proxy on the way to it is a mistake
]

DESCRIPTORS = 16
"""How many file descriptors must be free. The first connection takes 7 and a few while it begins; gRPC ends the process
with SIGABRT if it gets none."""


def open_channel(
    kind: ModuleType, endpoint: Endpoint, config: Config, more: Sequence[tuple[str, Any]] = (), longest: int = -1
) -> Any:
    """Returns a channel of `grpc` or `grpc.aio`.

    Args:
        kind: the module.
        endpoint: the shard.
        config: the configuration of the client.
        more: options of gRPC in addition to the usual ones.
        longest: the most bytes of an answer; -1: unlimited, because a history may be long.

    Raises:
        Unavailable: this process was forked from one that had connected, or has too few file descriptors left.
    """
    quiet_grpc.refuse_after_fork()
    quiet_grpc.note_connecting()
    at_exit.prepare()
    options: list[tuple[str, Any]] = [*_OPTIONS, ("grpc.max_receive_message_length", longest), *more]

    def make() -> Any:
        _require_descriptors()
        if config.tls is None:
            return kind.insecure_channel(endpoint.address, options=options)
        if endpoint.certified is not None:
            options.append(("grpc.ssl_target_name_override", endpoint.certified))
        return kind.secure_channel(endpoint.address, config.tls.credentials(), options=options)

    # gRPC makes a queue of events for its first channel on a loop. If an interrupt ends that, it destroys the queue of
    # the channels before a second time, and the heap with it (seen in gRPC 1.85).
    return uninterrupted(make) if kind is grpc.aio else make()


def _require_descriptors() -> None:
    held: list[int] = []
    try:
        while len(held) < DESCRIPTORS:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        raise Unavailable(f"cannot connect with fewer than {DESCRIPTORS} file descriptors: {error.strerror}") from None
    finally:
        for descriptor in held:
            os.close(descriptor)


def metadata(config: Config) -> tuple[tuple[str, str], ...] | None:
    """Returns the metadata of every call; None without a token."""
    token = bearer(config)
    return None if token is None else (("authorization", f"Bearer {token}"),)
