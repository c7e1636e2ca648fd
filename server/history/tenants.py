"""Who shares this server, and how much of it each tenant may use: of the index, the store, namespaces and sessions.

A namespace belongs to the first tenant of the token file that names it: a `[[tenant]]`, or a token that is bound to
namespaces. Otherwise it belongs to the token that created it, or after a restart to the tenant NOBODY, as without a
token file. It keeps its tenant until it is dropped or the server restarts.

A tenant may use up to what the file gives it. Where the file gives nothing, it may use what others leave, but a part of
every limit is kept for the others: each tenant of the file may always use its part of that (`KEPT`). The index needs no
such part, because it can evict: see `native/src/upkeep/evictor.h`.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal, NamedTuple, get_args

import structlog

from histospec.native import Engine
from histospec.server.arguments import shown
from histospec.server.errors import StoreError
from histospec.server.logs.lines import Throttle
from histospec.server.security.access import Access
from histospec.server.stores.interface import StoreSize

log = structlog.get_logger()

Resource = Literal["index", "store", "namespaces", "sessions"]
RESOURCES: tuple[Resource, ...] = get_args(Resource)

KEPT: dict[Resource, int] = {"store": 8, "namespaces": 64}
"""One part in this many of a limit is kept, in equal parts, for the tenants that use less than their part. A tenant may
need gigabytes of the store, but a run needs one namespace."""
MEASURE_SECONDS = 30.0  # between two measurements of what each tenant has stored ...
MEASURE_PAUSE = 20  # ... or this many times the time that one takes, so that it reads for 5 % of the time
NOBODY = ""
NO_LIMIT = (1 << 63) - 1


class Use(NamedTuple):
    """How much of one resource a tenant uses, and its share in the token file; None without one."""

    tenant: str
    resource: Resource
    used: int
    share: int | None
    refusals: int
    """Requests refused because of this resource."""


class Reservation:
    """Bytes of a tenant that wait for the store, and count as if they were stored. Ends with `settle` or as a context.

    A caller makes it right after `store_refusal` has allowed the bytes, before another caller asks.
    """

    def __init__(self, tenants: "Tenants", tenant: str, size: int) -> None:
        self._tenants = tenants
        self._tenant = tenant
        self._size = size
        tenants.waiting[tenant] += size

    def settle(self, stored: int = 0) -> None:
        """Ends the reservation: the store has taken `stored` bytes. Further calls without bytes change nothing."""
        self._tenants.waiting[self._tenant] -= self._size
        self._size = 0
        self._tenants.count_stored(self._tenant, stored)

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(self, *_: object) -> None:
        self.settle()


class Tenants:
    """The tenants of one server. Used on the event loop; `uses` may be called from any thread.

    Args:
        access: the token file.
        engine: gets the shares of the index.

    """

    def __init__(self, access: Access, engine: Engine) -> None:
        self.sessions: Counter[str] = Counter()
        """Open sessions, by tenant."""
        self.namespaces: Counter[str] = Counter()
        """Admitted namespaces, by tenant."""
        self.stored: Counter[str] = Counter()
        """Bytes in the store, by tenant; empty if the store does not know."""
        self.waiting: Counter[str] = Counter()
        """Bytes of reservations, by tenant."""
        self.refusals: Counter[tuple[str, Resource]] = Counter()
        self._access = access
        self._engine = engine
        self._measurable = True  # whether the store can tell what each namespace holds
        self._version = -1
        self._shares: dict[str, dict[str, int]] = {}
        self._follow()

    def _follow(self) -> None:
        """Takes over a changed token file."""
        if self._version == self._access.version:
            return
        self._version = self._access.version
        before, self._shares = self._shares, {}
        for tenant in self._access.tenants:
            its = self._shares.setdefault(tenant.name, {})
            its.update(tenant.shares.model_dump(exclude_none=True))
        for name in before.keys() | self._shares.keys():
            index = self._shares.get(name, {}).get("index")
            if index is not None or "index" in before.get(name, {}):
                self._engine.limit_tenant(name, NO_LIMIT if index is None else index)

    @property
    def known(self) -> bool:
        """Whether the token file has tenants. Without any, every namespace belongs to NOBODY, and no share matters."""
        return bool(self._access.tenants)

    def owner(self, namespace: str, creator: str = NOBODY) -> str:
        """Returns the tenant to which a new namespace belongs. `creator`: the name of the token that creates it."""
        bound = (one for one in self._access.tenants if "*" not in one.namespaces and one.has(namespace))
        return next((one.name for one in bound), creator)

    def admitted(self, namespace: str, tenant: str) -> None:
        """Gives a namespace to a tenant."""
        self.namespaces[tenant] += 1
        self._engine.assign(namespace, tenant)

    def forgot(self, namespace: str, tenant: str) -> None:
        """Takes a dropped namespace from its tenant."""
        self.namespaces[tenant] -= 1
        self._engine.assign(namespace, NOBODY)

    def refusal(self, resource: Resource, tenant: str, more: int, whole: int | None = None, total: int = 0) -> str:
        """Returns why a tenant may not use `more` of a resource; empty if it may.

        Args:
            resource: what it would use; not the index, which evicts.
            tenant: its name.
            more: how much it would use in addition.
            whole: the limit of the whole server; None if there is none.
            total: how much of that is in use.

        """
        self._follow()
        used: Counter[str] = {"store": self.stored, "namespaces": self.namespaces, "sessions": self.sessions}[resource]
        waiting = self.waiting if resource == "store" and self._measurable else Counter[str]()
        mine, share = used[tenant] + waiting[tenant], self._shares.get(tenant, {}).get(resource)
        why = ""
        if share is not None and mine + more > share:
            why = f"all of its share of {_shown(resource, share)} (shares.{resource} in the token file)"
        elif whole is not None:
            part = math.ceil(whole / KEPT[resource] / max(1, len(self._shares)))
            kept = sum(max(0, part - used[other]) for other in self._shares if other != tenant)
            if mine + more > part and total + waiting.total() + more > whole - kept:
                why = f"{_shown(resource, mine)} of {_shown(resource, whole)}; the rest is kept for other tenants"
        if why:
            self.refusals[tenant, resource] += 1
            return f"{resource}: tenant {tenant!r} uses {why}"
        return ""

    def store_refusal(self, tenant: str, more: int, size: StoreSize) -> str:
        """Returns why a tenant may not store `more` bytes in a store of this size; empty if it may."""
        whole = size.limit
        if whole is None and size.held is not None and size.disk_free is not None:
            whole = size.held + size.disk_free
        return self.refusal("store", tenant, more, whole, size.held or 0)

    def reserve(self, tenant: str, size: int) -> Reservation:
        """Counts bytes that wait for the store, until the reservation is settled."""
        return Reservation(self, tenant, size)

    def count_stored(self, tenant: str, size: int) -> None:
        """Counts bytes that a tenant has stored since the last measurement."""
        if self.known and self._measurable:
            self.stored[tenant] += size

    async def measure(
        self, sizes: Callable[[], Awaitable[dict[str, int] | None]], tenant: Callable[[str], str]
    ) -> None:
        """Measures again and again what each tenant has stored. In between, only what is added counts.

        Args:
            sizes: returns the stored bytes of each namespace; None if the store cannot tell. May raise StoreError.
            tenant: returns the tenant of a namespace.

        """
        throttle = Throttle(1, 60.0)
        while self._measurable:
            started = time.monotonic()
            if self.known:
                try:
                    found = await sizes()
                except StoreError as error:
                    if (left_out := throttle.admits("failed")) is not None:
                        log.warning("the bytes of each tenant are not known", reason=str(error), **left_out)
                else:
                    self._measurable = found is not None
                    self.stored.clear()
                    for namespace, size in (found or {}).items():
                        self.stored[tenant(namespace)] += size
            await asyncio.sleep(max(MEASURE_SECONDS, MEASURE_PAUSE * (time.monotonic() - started)))

    def has_more_sessions(self, tenant: str) -> bool | None:
        """Returns whether a tenant has more open sessions than tenants with sessions have on average.

        Returns None if no two tenants have sessions.
        """
        others = [number for name, number in self.sessions.items() if number and name != tenant]
        return self.sessions[tenant] * len(others) > sum(others) if others else None

    def uses(self) -> list[Use]:
        """Returns what each tenant uses: those of the token file, and others that use something."""
        used: dict[Resource, Mapping[str, int]] = {
            "index": self._engine.tenants(),
            "store": self.stored.copy(),
            "namespaces": self.namespaces.copy(),
            "sessions": self.sessions.copy(),
        }
        shares = self._shares
        names = dict.fromkeys([*shares, *(name for some in used.values() for name, number in some.items() if number)])
        return [
            Use(
                name,
                resource,
                used[resource].get(name, 0),
                shares.get(name, {}).get(resource),
                self.refusals[name, resource],
            )
            for name in names
            for resource in RESOURCES
        ]


def _shown(resource: Resource, number: int) -> str:
    return shown(number) if resource in ("index", "store") else str(number)
