"""Decides which responses of a problem to keep: the newest epochs, and of these the newest responses."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from histospec.server.stores.interface import Record


class Window:
    """The number of responses that a problem has of each epoch. A call costs time only for what it adds and removes."""

    def __init__(self, counts: Iterable[tuple[int, int]]) -> None:
        self._counts = dict(counts)
        self._epochs = sorted(self._counts)
        self._total = sum(self._counts.values())

    def add(self, records: Iterable[Record]) -> None:
        """Adds records."""
        for record in records:
            if record.epoch not in self._counts:
                insort(self._epochs, record.epoch)
                self._counts[record.epoch] = 0
            self._counts[record.epoch] += 1
            self._total += 1

    def remove_oldest(self, number: int) -> None:
        """Removes the oldest responses."""
        while number and self._epochs:
            oldest = self._epochs[0]
            some = min(number, self._counts[oldest])
            number -= some
            self._total -= some
            self._counts[oldest] -= some
            if not self._counts[oldest]:
                del self._counts[oldest]
                del self._epochs[0]

    def admit(self, records: Sequence[Record], epochs: int, responses: int, slack: int) -> tuple[list[Record], int]:
        """Returns the records to add, by epoch, and how many of the oldest responses to remove.

        Keeps the newest `epochs`, and if there are more than `responses + slack`, only the newest `responses`.
        """
        new = {record.epoch for record in records} - self._counts.keys()
        first = sorted([*self._epochs[-epochs:], *new])[-epochs:][0] if self._epochs or new else 0
        stay = sorted((record for record in records if record.epoch >= first), key=lambda record: record.epoch)
        leave = sum(self._counts[epoch] for epoch in self._epochs[: bisect_left(self._epochs, first)])
        excess = self._total - leave + len(stay) - responses
        if excess > slack:
            # Removal order: by epoch, and within an epoch held responses before new ones.
            at = bisect_left(self._epochs, first)
            while excess and (stay or at < len(self._epochs)):
                if at < len(self._epochs) and (not stay or self._epochs[at] <= stay[0].epoch):
                    some = min(excess, self._counts[self._epochs[at]])
                    leave, excess, at = leave + some, excess - some, at + 1
                else:
                    stay, excess = stay[1:], excess - 1
        return stay, leave
