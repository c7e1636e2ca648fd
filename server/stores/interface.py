"""The interface of all stores."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from itertools import groupby
from typing import NamedTuple

from histospec.protocol.arrays import INT32
from histospec.server.arguments import shown
from histospec.server.errors import LimitExceeded

HISTORY_RESPONSES = 4096
"""The default number of responses kept for each problem, the newest ones."""
LAST_EPOCH = (1 << 63) - 1
"""The largest epoch that a store can hold. Counted epochs may be larger than MAX_EPOCH, the limit of given ones."""
PROMPT_BYTES = 100
"""What a prompt takes in a store besides its names and tokens: its digest, the time of its last write, and rows."""
RESPONSE_BYTES = 60
"""What a response takes in a store besides its arrays: its numbers, its row and its place in an index."""
WAITING_BYTES = 2 << 10
"""What a batch takes in memory while it waits for the store, besides its size there."""


class Problem(NamedTuple):
    """Identity of a problem: its explicit name, or if that is empty, all tokens of its prompt."""

    namespace: str
    prompt: bytes
    """int32 little-endian."""
    name: str = ""

    @property
    def identity(self) -> "Problem":
        """The same for all prompts of one problem: the problem, without its prompt if it has a name."""
        return self._replace(prompt=b"") if self.name else self

    def size_with(self, arrays: int, responses: int) -> int:
        """Returns the bytes that the prompt and so many responses, whose arrays have `arrays` bytes, take in a store.

        A store has the names twice: in the row and in an index.
        """
        names = 2 * len((self.namespace + self.name).encode())
        return len(self.prompt) + names + PROMPT_BYTES + arrays + responses * RESPONSE_BYTES


class Record(NamedTuple):
    """One finished response as stored. Arrays are little-endian, as on the wire."""

    tokens: bytes
    """int32[n]."""
    epoch: int
    reward: float | None = None
    logprobs: bytes = b""
    """float32, empty or [n]."""
    generated: bytes = b""
    """uint8, empty (all generated) or [n]."""
    seed: int | None = None
    """The sampling seed of the response, int64."""
    alternatives: bytes = b""
    """The most probable other tokens, as in `protocol.alternatives`; empty if unknown."""

    @property
    def size(self) -> int:
        """The bytes of its arrays."""
        return len(self.tokens) + len(self.logprobs) + len(self.generated) + len(self.alternatives)


class ResponseBatch(NamedTuple):
    """Responses of one problem and one epoch, stored and indexed together."""

    problem: Problem
    records: list[Record]

    @property
    def tokens(self) -> int:
        """The number of tokens of the responses."""
        return sum(len(record.tokens) for record in self.records) // INT32.itemsize

    @property
    def size(self) -> int:
        """The bytes that it takes in a store, with its prompt."""
        return self.problem.size_with(total_size(self.records), len(self.records))

    @property
    def waiting_size(self) -> int:
        """About the bytes that it takes in memory while it waits for the store, with its callers."""
        return self.size + WAITING_BYTES


class StoreSize(NamedTuple):
    """The size and limits of a store, in bytes; None where unknown or absent."""

    held: int | None = None
    """The size of the contents: for SQLite the file without free pages, and the log; for Redis all memory."""
    limit: int | None = None
    """The maximum size: --disk, or the `maxmemory` of Redis."""
    disk_free: int | None = None
    """The free space of the volume that holds its files."""
    disk_size: int | None = None
    """The size of that volume."""


class Reader(ABC):
    """Reads a store. Any thread may call the methods; they block, and raise StoreError."""

    def complete(self) -> None:  # noqa: B027 - most stores lack nothing
        """Makes sure that `newest_epochs` and `problems` leave nothing out. Call it before reading a whole store."""

    @abstractmethod
    def newest_epochs(self) -> dict[str, int]:
        """Returns the newest epoch of every namespace."""

    @abstractmethod
    def problems(self, namespace: str) -> Iterator[tuple[Problem, list[Record]]]:
        """Yields the problems of a namespace that have responses, each once, with its responses, oldest first.

        Holds only a few problems at a time. A named problem comes with one of its prompts.
        """

    @abstractmethod
    def history(self, problem: Problem, limit: int = 0, max_bytes: int | None = None) -> list[Record]:
        """Returns the responses of a problem, oldest first; with a limit, only that many of the newest.

        Raises LimitExceeded if their arrays exceed `max_bytes`.
        """

    @abstractmethod
    def estimator(self, namespace: str) -> bytes | None:
        """Returns the last saved estimator of a namespace; None if there is none."""

    def estimators(self) -> dict[str, bytes]:
        """Returns the last saved estimators, by namespace."""
        states = ((namespace, self.estimator(namespace)) for namespace in self.newest_epochs())
        return {namespace: state for namespace, state in states if state is not None}

    def pages(self, problem: Problem) -> Iterator[list[Record]]:
        """Yields the responses to index, in pieces: newest piece first, and within a piece oldest response first."""
        yield self.history(problem)

    def sizes(self) -> dict[str, int] | None:
        """Returns the bytes of the prompts and responses of each namespace, counted as in `ResponseBatch.size`.

        Returns None if the store cannot tell.

        May take long.
        """
        return None

    def count(self) -> int:
        """Returns the number of responses."""
        return sum(len(records) for namespace in self.newest_epochs() for _, records in self.problems(namespace))

    @property
    def damaged_responses(self) -> int:
        """The number of stored responses that were left out because they were damaged or unreadable."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Finishes pending work and closes the store."""


class Store(Reader):
    """Keeps responses across restarts. Any thread may call the methods."""

    whole_at_start: bool = True
    """Whether the server loads the store in the background at the start. If not, it reads problems on demand."""

    def wanted_first(self) -> Iterator[list[Problem]]:
        """Yields the problems that have responses, some at a time, in the order in which to load them.

        Problems that callers most likely need come first. Problems stored after the call may be missing.
        """
        return iter(())

    def look_for_damage(self) -> None:
        """Starts to search for damage that normal reads do not meet. Returns at once; called after loading."""

    @property
    def opening(self) -> str:
        """What remains to be done before the store can be used; empty if it is open."""
        return ""

    @property
    @abstractmethod
    def waiting_bytes(self) -> int:
        """The bytes of queued writes."""

    @property
    @abstractmethod
    def waiting_limit(self) -> int:
        """The maximum of `waiting_bytes` (--max-backlog)."""

    @property
    def size(self) -> StoreSize:
        """Returns the size and limits. Never waits for another machine, and never raises."""
        return StoreSize()

    @property
    def trouble(self) -> str:
        """Why nothing can be stored until a person acts; empty if it can."""
        return ""

    @property
    def hazard(self) -> str:
        """Which setting may make the store lose responses, and what to set instead; empty if none."""
        return ""

    def replaced(self) -> dict[str, bool]:
        """Returns the namespaces whose contents are others than at the last call, and whether they were dropped.

        Another shard dropped or rewound them, or the store lost them.
        """
        return {}

    @property
    def outage(self) -> str:
        """Why the store does not answer now, so that requests fail until it does; empty if it answers. Never waits."""
        return ""

    @property
    def retention_paused(self) -> str:
        """Why retention waits for a person; empty if it does not."""
        return ""

    @abstractmethod
    def append(self, batch: ResponseBatch) -> "Future[int]":
        """Adds responses; the future is done once they survive a crash, all of them or none.

        The store keeps the newest epochs of the problem, and of these the newest responses. The future holds how many
        of the batch it does not keep, because they are older. It fails with StoreBusy if the queue is full, otherwise
        with StoreFull or StoreError.
        """

    @abstractmethod
    def drop(self, namespace: str) -> "Future[int]":
        """Drops a namespace; the future holds how many responses it had.

        Its estimator is dropped, too, also one whose save was requested before this call.
        """

    @abstractmethod
    def rewind(self, namespace: str, epoch: int) -> "Future[int]":
        """Deletes responses of newer epochs; the future holds how many there were."""

    @abstractmethod
    def save_estimator(self, namespace: str, state: bytes) -> "Future[None]":
        """Saves the estimator of a namespace, in place of the previous one.

        Fails with StoreFull or StoreError; then the previous one stays.
        """


def by_epoch(problem: Problem, records: Iterable[Record]) -> Iterator[ResponseBatch]:
    """Splits records, which are ordered by epoch, into one batch per epoch."""
    for _, some in groupby(records, key=lambda record: record.epoch):
        yield ResponseBatch(problem, list(some))


def within(max_bytes: int, size: int) -> None:
    """Raises LimitExceeded if `size` exceeds `max_bytes`."""
    if size > max_bytes:
        raise LimitExceeded(
            f"history: the requested responses have {size} bytes, more than the limit of {shown(max_bytes)} "
            "(--max-message); ask for fewer with limit"
        )


def total_size(records: Sequence[Record]) -> int:
    """Returns the bytes of the arrays of several records."""
    return sum(record.size for record in records)
