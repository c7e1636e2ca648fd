"""Finds out why a shard does not answer, in a thread of its own, and has the core log the reason.

The worker never waits for this. A core asks at most once per minute and shard. The thread makes its own connections, so
it needs neither gRPC nor the loop of the streams. It does not exist in a forked process, in which no client works. The
interpreter does not wait for it at exit.
"""

import logging
import threading

import grpc

from histospec.client.config import Endpoint
from histospec.client.core.core import Core
from histospec.client.core.news import Outage
from histospec.client.core.shard import ShardState
from histospec.client.transport.diagnosis import diagnose

log = logging.getLogger("histospec.client")

PATIENCE = 2.0
"""Seconds for each address."""
BY_THE_SERVER = frozenset(
    (
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.DATA_LOSS,
    )
)
"""Statuses that a HistoSpec server itself returns, so the address is right."""
NOT_THE_ADDRESS = ("wants-tls", "plain", "certificate", "files")
"""Kinds of trouble with the right server at the address."""


def explain(core: Core, shard: ShardState) -> None:
    """Starts to find out why the shard does not answer, and then has the core log it. Never waits."""
    if shard.contact.code in BY_THE_SERVER:
        core.tell(shard)
        return
    try:
        threading.Thread(target=_find_out, args=(core, shard), name="histospec-diagnosis", daemon=True).start()
    except RuntimeError:  # the interpreter ends, or there may be no more threads
        core.tell(shard)


def _find_out(core: Core, shard: ShardState) -> None:
    outage = None
    try:
        found = shard.endpoint.address != ""
        asked = (shard.endpoint,) if found else core.config.endpoints  # the addresses behind which shards were expected
        outages = [_diagnose(core, endpoint) for endpoint in asked]
        if all(outages):
            outage = outages[0]
    except Exception:
        log.debug("HistoSpec: why %s does not answer could not be found out", shard.name, exc_info=True)
    core.tell(shard, outage)


def _diagnose(core: Core, endpoint: Endpoint) -> Outage | None:
    trouble = diagnose(endpoint.address, core.config.tls, PATIENCE, endpoint.certified)
    if trouble is None:
        return None
    where = endpoint.address if endpoint.name == endpoint.address else f"{endpoint.address}, shard {endpoint.name}"
    advice = trouble.advice
    if trouble.kind not in NOT_THE_ADDRESS:
        advice = f"is HISTOSPEC_ENDPOINT right? {advice[:1].upper()}{advice[1:]}"
    return Outage(f"no server at {where} ({trouble.text})", advice)
