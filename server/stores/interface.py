"""What a store promises, whatever keeps the bytes."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from itertools import groupby
from typing import NamedTuple

from histospec.protocol.arrays import INT32
from histospec.server.arguments import shown
from histospec.server.errors import LimitExceeded

HISTORY_RESPONSES = 4096
"""Responses of a problem that are kept, unless told otherwise: the newest."""
LAST_EPOCH = (1 << 63) - 1
"""The largest epoch that a store can hold: older versions took any int64."""


class Problem(NamedTuple):
    """Identity of a problem: its explicit name, or, where that is empty, all tokens of its prompt."""

    namespace: str
    prompt: bytes
    """int32 little-endian."""
    name: str = ""

    @property
    def identity(self) -> "Problem":
        """Equal for all prompts of one problem: the problem, without its prompt where it has a name."""
        return self._replace(prompt=b"") if self.name else self


class Record(NamedTuple):
    """One finished response as it is kept. Arrays are little-endian, as on the wire."""

    tokens: bytes
    """int32[n]."""
    epoch: int
    reward: float | None = None
    logprobs: bytes = b""
    """float32, empty or [n]."""
    generated: bytes = b""
    """uint8, empty (all generated) or [n]."""
    seed: int | None = None
    """The sampling seed that it was drawn with, int64."""

    @property
    def size(self) -> int:
        """Bytes of its arrays."""
        return len(self.tokens) + len(self.logprobs) + len(self.generated)


class ResponseBatch(NamedTuple):
    """Responses of one problem and one epoch: what is stored, and indexed, together."""

    problem: Problem
    records: list[Record]

    @property
    def tokens(self) -> int:
        """How many tokens the responses have."""
        return sum(len(record.tokens) for record in self.records) // INT32.itemsize


class StoreSize(NamedTuple):
    """How much room a store takes and has, in bytes; None where that is not known, or does not exist."""

    held: int | None = None
    """What it holds: of SQLite the file without its free pages, and the write-ahead log; of Redis all of its memory."""
    limit: int | None = None
    """How much that may become: --disk, or the `maxmemory` of Redis."""
    disk_free: int | None = None
    """Of the volume that holds its files: what the server may still write."""
    disk_size: int | None = None
    """Of that volume."""


class Reader(ABC):
    """What was stored. All methods may be called from any thread; they block, and raise StoreError."""

    @abstractmethod
    def newest_epochs(self) -> dict[str, int]:
        """Every namespace, with the newest epoch that it has seen."""

    @abstractmethod
    def problems(self, namespace: str) -> Iterator[tuple[Problem, list[Record]]]:
        """The problems of a namespace that have responses, each once, with these, oldest first.

        Holds a few problems at a time. A named problem has one of the prompts that it came with.
        """

    @abstractmethod
    def history(self, problem: Problem, limit: int = 0, room: int | None = None) -> list[Record]:
        """Responses of one problem, oldest first; with a limit, the newest so many.

        Raises LimitExceeded where their arrays have more than `room` bytes.
        """

    @abstractmethod
    def estimator(self, namespace: str) -> bytes | None:
        """What was saved last of what the drafter of a namespace has learned; None where nothing was."""

    def estimators(self) -> dict[str, bytes]:
        """What was saved last, for each namespace that has something."""
        states = ((namespace, self.estimator(namespace)) for namespace in self.newest_epochs())
        return {namespace: state for namespace, state in states if state is not None}

    def pages(self, problem: Problem) -> Iterator[list[Record]]:
        """What `history` returns, in pieces: the newest responses first, in each piece the oldest first."""
        yield self.history(problem)

    def count(self) -> int:
        """How many responses there are."""
        return sum(len(records) for namespace in self.newest_epochs() for _, records in self.problems(namespace))

    @property
    def damaged_responses(self) -> int:
        """How many stored responses were found damaged, or could not be read, and were left out."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Finishes what was asked for and closes."""


class Store(Reader):
    """Where responses survive a restart. All methods may be called from any thread."""

    whole_at_start: bool = True
    """Whether the server loads it in the background when it starts. If not, it reads a problem when it is asked for."""

    def wanted_first(self) -> Iterator[list[Problem]]:
        """The problems that have responses, some at a time, in the order in which to load them at the start.

        The problems come first that callers will most likely ask for. What is stored after the call may be missing.
        """
        return iter(())

    def look_for_damage(self) -> None:
        """Begins to look for damage that reading does not meet. Returns at once; called when loading is over."""

    @property
    def opening(self) -> str:
        """What is still to be done before anything can be stored or read, or nothing."""
        return ""

    @property
    @abstractmethod
    def waiting_bytes(self) -> int:
        """How much of what was asked for is not written yet."""

    @property
    def size(self) -> StoreSize:
        """How much room it takes and has. Never waits for another machine, and raises nothing."""
        return StoreSize()

    @property
    def trouble(self) -> str:
        """Why nothing can be stored until a person acts, or nothing."""
        return ""

    @property
    def retention_paused(self) -> str:
        """Why retention waits for a person, or nothing."""
        return ""

    @abstractmethod
    def append(self, batch: ResponseBatch) -> "Future[None]":
        """Adds responses; the future is done once they survive a crash, all of them or none.

        Fails with StoreFull or StoreError. Of the problem, the newest epochs are kept, and of these the newest
        responses.
        """

    @abstractmethod
    def drop(self, namespace: str) -> "Future[int]":
        """Forgets a namespace; the future holds how many responses that were.

        Its estimator goes with them, also one whose saving was asked for before this call.
        """

    @abstractmethod
    def rewind(self, namespace: str, epoch: int) -> "Future[int]":
        """Forgets the responses of newer epochs; the future holds how many responses that were."""

    @abstractmethod
    def save_estimator(self, namespace: str, state: bytes) -> "Future[None]":
        """Keeps what the drafter of a namespace has learned, in place of what was kept before.

        Fails with StoreFull or StoreError, and then what was kept before stays.
        """


def by_epoch(problem: Problem, records: Iterable[Record]) -> Iterator[ResponseBatch]:
    """Records that are in the order of their epochs, as one batch an epoch."""
    for _, some in groupby(records, key=lambda record: record.epoch):
        yield ResponseBatch(problem, list(some))


def within(room: int, size: int) -> None:
    """Raises LimitExceeded where responses of so many bytes do not fit into an answer."""
    if size > room:
        raise LimitExceeded(
            f"history: the responses asked for have {size} bytes, more than the limit of {shown(room)} "
            "(--max-message); ask for fewer with limit"
        )


def total_size(records: Sequence[Record]) -> int:
    """Bytes of the arrays of several records."""
    return sum(record.size for record in records)
