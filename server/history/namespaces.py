"""Knows the namespaces of a shard: which ones callers may create, and the newest epoch of each."""

import asyncio
import bisect
import difflib
import heapq
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import structlog

from histospec.protocol.names import white_space
from histospec.server.errors import InvalidRequest, LimitExceeded, StoreError
from histospec.server.history.tenants import NOBODY, Tenants
from histospec.server.logs.lines import Throttle
from histospec.server.stores.interface import Problem, Record, ResponseBatch, Store

log = structlog.get_logger()

NEARLY_SAME = 0.75
"""The least similarity: two of eight characters differ."""
MIDDLE = 16
"""Characters of the longest middles that are compared. `difflib` takes up to a millisecond for two long names."""
NEIGHBOURS = 8
"""Names on either side of a name, in each order, that are compared with it."""
WATCH_SECONDS = 3.0
"""Between two checks for newer epochs in a shared store."""
FIRST_EPOCH = 1 << 31
"""The largest epoch with which a caller may begin to name epochs: a Unix time in seconds fits until 2038."""
EPOCHS_AHEAD = 1 << 20
"""How far an epoch may be ahead of the newest one: a thousand steps for a trainer that counts in thousands."""
AHEAD_SHARE = 64
"""This part of the newest epoch may be ahead, too: with Unix times, a run may pause for ten months."""


def look_alikes(name: str, others: Iterable[str], most: int) -> list[str]:
    """Returns names similar to `name`, the most similar first; never `name` itself.

    Compares only the names with which `name` shares the longest beginnings and the longest ends: its neighbours when
    sorted from the left and from the right.
    """
    known = [other for other in others if other != name]
    near = dict.fromkeys(_neighbours(name, known))
    near |= dict.fromkeys(other[::-1] for other in _neighbours(name[::-1], (other[::-1] for other in known)))
    ranked = heapq.nlargest(most, ((_similarity(name, other), other) for other in near))
    return [other for similarity, other in ranked if similarity >= NEARLY_SAME]


def _similarity(name: str, other: str) -> float:
    """Returns twice the equal characters of two names divided by the characters of both, as `difflib` counts them.

    Of the middles, between the common beginning and the common end, nothing counts if one is longer than MIDDLE.
    """
    start = _common_beginning(name, other)
    rests = name[start:], other[start:]
    end = _common_beginning(*(rest[::-1] for rest in rests))
    first, second = (rest[: len(rest) - end] for rest in rests)
    same = 2.0 * (start + end)
    if max(len(first), len(second)) <= MIDDLE:
        same += difflib.SequenceMatcher(None, first, second).ratio() * (len(first) + len(second))
    return same / (len(name) + len(other))


def _common_beginning(first: str, second: str) -> int:
    """Returns the number of characters with which both begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _neighbours(name: str, others: Iterable[str]) -> list[str]:
    ordered = sorted(others)
    at = bisect.bisect(ordered, name)
    return ordered[max(0, at - NEIGHBOURS) : at + NEIGHBOURS]


class Namespaces:
    """Decides which namespaces a caller may create. Used only on the event loop."""

    def __init__(self, limit: int, tenants: Tenants) -> None:
        self._admitted: dict[str, str] = {}  # with the tenant of each
        self._limit = limit
        self._tenants = tenants
        self._known = False

    def know(self, stored: Iterable[str]) -> None:
        """Adds the namespaces of the store. Before this call, any name may be one of them."""
        for namespace in stored:
            if namespace not in self._admitted:
                self._add(namespace, self._tenants.owner(namespace))
        self._known = True

    def tenant(self, namespace: str) -> str:
        """Returns the tenant of a namespace."""
        return self._admitted.get(namespace, NOBODY)

    def admit(self, namespace: str, creator: str = NOBODY) -> None:
        """Adds a namespace if it is new. `creator`: the name of the caller's token.

        Raises LimitExceeded if there are too many, or too many of its tenant, and InvalidRequest for a new name that
        begins or ends with white space. A stored namespace with such a name remains usable.
        """
        if namespace in self._admitted:
            return
        if self._known and (wrong := white_space(namespace)):
            raise InvalidRequest(f"namespace: {wrong}")
        if len(self._admitted) >= self._limit:
            text = f"namespace: the server is at its limit of {self._limit} namespaces; drop one, or raise "
            raise LimitExceeded(f"{text}--max-namespaces")
        tenant = self._tenants.owner(namespace, creator)
        if refusal := self._tenants.refusal("namespaces", tenant, 1, self._limit, len(self._admitted)):
            raise LimitExceeded(refusal)
        self._add(namespace, tenant)

    def _add(self, namespace: str, tenant: str) -> None:
        self._admitted[namespace] = tenant
        self._tenants.admitted(namespace, tenant)

    def forget(self, namespace: str) -> None:
        """Removes a dropped namespace."""
        if (tenant := self._admitted.pop(namespace, None)) is not None:
            self._tenants.forgot(namespace, tenant)


class Progress(NamedTuple):
    """The epochs of a namespace."""

    newest: int = 0
    behind: int = 0
    """How many responses arrived since the last one of the newest epoch: many if a run went back to a checkpoint."""
    behind_epoch: int = 0
    """The newest epoch of these."""


class Epochs:
    """Knows the newest epoch of each namespace, and what may advance it. Used only on the event loop.

    Callers advance it, and other shards that share the store.

    Args:
        store: may be shared.
        watch_seconds: time between two checks of the store.
        follow: called for a namespace that the store no longer has as it was, with the newest epoch there, or None if
            another shard dropped it. Must call `set_back`.

    """

    def __init__(
        self, store: Store, watch_seconds: float, follow: Callable[[str, int | None], Coroutine[Any, Any, None]]
    ) -> None:
        self._store = store
        self._watch_seconds = watch_seconds
        self._follow = follow
        self._newest: dict[str, int] = {}
        self._behind: dict[str, Progress] = {}  # of namespaces in which older responses arrived since
        self._explicit: set[str] = set()  # namespaces in which a caller has given an epoch
        self._begun: set[str] = set()  # namespaces that had epochs when the store was opened
        self._setbacks = 0  # drops and rewinds; epochs read from the store before the last one are outdated
        self._closing = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    def newest(self, namespace: str) -> int:
        """Returns the newest epoch of the namespace; 0 at first."""
        return self._newest.get(namespace, 0)

    def progress(self, namespace: str) -> Progress:
        """Returns the epochs of the namespace. Called from any thread."""
        return self._behind.get(namespace, Progress())._replace(newest=self.newest(namespace))

    def check(self, field: str, namespace: str, epoch: int) -> None:
        """Raises InvalidRequest, which names the field, if an explicit epoch is too far ahead.

        The first one may be further ahead, also of responses whose epochs were counted before.
        """
        begun = namespace in self._explicit or namespace in self._begun
        self._refuse(field, namespace, epoch, self._limit(namespace) if begun else self._first_limit(namespace))

    def counted(self, field: str, namespace: str, epoch: int) -> int:
        """Returns the epoch for a response that a worker counts as of `epoch`; at least the newest epoch.

        Raises InvalidRequest, which names the field, if the count is too far ahead.
        """
        newest = self.newest(namespace)
        if namespace in self._explicit:
            return newest
        self._refuse(field, namespace, epoch, self._limit(namespace))
        return max(newest, epoch)

    def check_import(self, namespace: str, problems: Sequence[tuple[Problem, list[Record]]]) -> None:
        """Raises InvalidRequest if an epoch of an import is too far ahead.

        The problems of a backup come in no order of epochs, so all of them may be as far ahead as a first epoch.
        """
        limit = self._first_limit(namespace)
        for i, (_, records) in enumerate(problems):
            for j, record in enumerate(records):
                if record.epoch > limit:
                    self._refuse(f"problems[{i}].responses[{j}].epoch", namespace, record.epoch, limit)

    def _limit(self, namespace: str) -> int:
        newest = self.newest(namespace)
        return newest + max(EPOCHS_AHEAD, newest // AHEAD_SHARE)

    def _first_limit(self, namespace: str) -> int:
        return max(FIRST_EPOCH, self._limit(namespace))

    def _refuse(self, field: str, namespace: str, epoch: int, limit: int) -> None:
        if epoch > limit:
            raise InvalidRequest(
                f"{field}: {epoch} is more than the limit of {limit}: too far ahead of {self.newest(namespace)}, the "
                f"newest epoch of namespace {namespace!r}"
            )

    def saw(self, batch: ResponseBatch, explicit: bool = False) -> None:
        """Raises the newest epoch to that of the batch, and counts the batch if it is older.

        `explicit`: the caller gave the epoch; weight-change counts no longer advance the namespace.
        """
        namespace = batch.problem.namespace
        if explicit:
            self._explicit.add(namespace)
        newest = self.newest(namespace)
        epoch = max((record.epoch for record in batch.records), default=newest)
        self._newest[namespace] = max(newest, epoch)
        if epoch >= newest:
            self.caught_up(namespace)
        else:
            before = self._behind.get(namespace, Progress())
            behind = before.behind + len(batch.records)
            self._behind[namespace] = Progress(behind=behind, behind_epoch=max(epoch, before.behind_epoch))

    def caught_up(self, namespace: str) -> None:
        """Counts no response as older than the newest: also after an import, which brings old epochs."""
        self._behind.pop(namespace, None)

    def open(self, stored: dict[str, int]) -> None:
        """Takes the namespaces of the store that was opened, with their newest epochs."""
        self._begun.update(name for name, epoch in stored.items() if epoch)
        self.merge(stored)

    def merge(self, stored: dict[str, int]) -> None:
        """Raises the newest epochs to those of the store."""
        self._newest.update({name: max(self.newest(name), epoch) for name, epoch in stored.items()})

    def set_back(self, namespace: str, epoch: int | None) -> None:
        """Sets the newest epoch back to `epoch`. None: the namespace was dropped, and its epochs start again."""
        self._setbacks += 1
        self.caught_up(namespace)
        if epoch is None:
            self._newest.pop(namespace, None)
            self._explicit.discard(namespace)
            self._begun.discard(namespace)
        elif namespace in self._newest:
            self._newest[namespace] = min(self._newest[namespace], epoch)

    def watch(self) -> None:
        """Starts to check every few seconds what other shards have done, if they share the store."""
        if not self._store.whole_at_start:
            self._watching = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        throttle = Throttle(1, 60.0)
        while True:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closing.wait(), self._watch_seconds)
                return
            before = self._setbacks
            try:
                replaced = await asyncio.to_thread(self._store.replaced)
                stored = await asyncio.to_thread(self._store.newest_epochs)
            except StoreError as error:
                if (left_out := throttle.admits("failed")) is not None:
                    log.warning("the newest epochs of other shards are not known", reason=str(error), **left_out)
            else:
                for namespace, dropped in replaced.items():
                    await self._follow(namespace, None if dropped else stored.get(namespace, 0))
                if before + len(replaced) == self._setbacks:
                    self.merge(stored)

    async def close(self) -> None:
        """Stops watching, after a check that runs."""
        self._closing.set()
        if self._watching is not None:
            await self._watching
