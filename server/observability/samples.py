"""The last hour of one server as a ring of samples: counters and contents."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from histospec.native import SOURCES
from histospec.protocol.gains import STEPS
from histospec.server.observability.metrics import SECONDS

EVERY = 5.0  # seconds between samples
HOUR = 3600.0
SMOOTH = 60.0  # seconds that each point of a series averages over, because sessions open in bursts
RECENT = 600.0  # seconds that count as recent

EVICTED = ("evicted_by_memory", "evicted_by_epochs", "evicted_by_responses")
BY_SOURCE = tuple(f"{source}.{name}" for source in SOURCES for name in ("draft_tokens", "accepted_tokens"))
COUNTED = (
    "lookups_hit", "lookups_miss", "twins_hit", "twins_miss", *STEPS, "draft_tokens", "accepted_tokens",
    "generated_tokens", *EVICTED, "ingested_responses", "ingested_tokens", "too_old_responses", "store_errors",
    *BY_SOURCE, "batch_steps", "late_steps",
)  # fmt: skip
"""Numbers that only grow."""
CONTENTS = ("sessions", "streams", "index_bytes", "history_tokens")
"""Numbers that rise and fall."""

Rows = NDArray[np.float64]
Series = dict[str, list[float | None]]
LIMITS = np.array((0.0, *SECONDS, SECONDS[-1]))  # bounds of the histogram's buckets; the last one has no upper bound


class Sample(NamedTuple):
    """One sample."""

    time: float
    """Seconds of a monotonic clock."""
    values: Mapping[str, float]
    """The values of COUNTED and CONTENTS."""
    buckets: Sequence[float]
    """Steps by their time in the engine: len(SECONDS) + 1 cumulative counts, as in a histogram."""


class Samples:
    """Up to an hour of samples, about 300 KB, however many problems there are."""

    def __init__(self) -> None:
        self._rows: deque[Rows] = deque(maxlen=int(HOUR / EVERY) + 1)

    def add(self, sample: Sample) -> None:
        """Adds a sample, in place of the last one if it comes early. Removes samples older than an hour."""
        rows = self._rows
        if len(rows) > 1 and rows[-1][0] - rows[-2][0] < EVERY:
            rows.pop()
        values = [sample.values[name] for name in (*COUNTED, *CONTENTS)]
        rows.append(np.array([sample.time, *values, *sample.buckets]))
        while rows[0][0] < sample.time - HOUR:
            rows.popleft()

    def totals(self) -> dict[str, float]:
        """Returns the last sample."""
        return dict(zip((*COUNTED, *CONTENTS), self._rows[-1][1:].tolist(), strict=False))

    def recent(self) -> dict[str, float | None]:
        """Returns the counts of the last RECENT seconds, or since the first sample; `seconds` is the actual period.

        `draft_p50` and `draft_p99` are in seconds; None without steps.
        """
        last = self._rows[-1]
        first = next(row for row in self._rows if row[0] >= last[0] - RECENT)
        change = last - first
        half, most = _quantiles(change[None, 1 + len(COUNTED) + len(CONTENTS) :])
        counted: dict[str, float | None] = dict(zip(COUNTED, change[1:].tolist(), strict=False))
        return counted | {"seconds": float(change[0]), "draft_p50": half[0], "draft_p99": most[0]}

    def series(self, points: int = 120, offset: float = 0.0) -> Series:
        """Returns the hour in at most `points` points, oldest first. Each point covers the minute before it.

        `time` is that of the samples plus `offset`. Shares are fractions, None where the divisor is 0. Tokens and
        responses are per second. `draft_p50` and `draft_p99` are in seconds. Contents are values at that moment.
        """
        rows = np.stack(self._rows)
        every = max(1, -(-(len(rows) - 1) // points))
        chosen = np.arange(len(rows) - 1, 0, -every)[::-1]  # always includes the last row
        before = np.searchsorted(rows[:, 0], rows[chosen, 0] - max(SMOOTH, every * EVERY))
        change = rows[chosen] - rows[np.minimum(before, chosen - 1)]
        seconds = change[:, 0]
        count = dict(zip(COUNTED, change[:, 1:].T, strict=False))
        contents = dict(zip(CONTENTS, rows[chosen, 1 + len(COUNTED) :].T, strict=False))
        half, most = _quantiles(change[:, 1 + len(COUNTED) + len(CONTENTS) :])
        rates = ("draft_tokens", "accepted_tokens", "ingested_tokens", *EVICTED, "store_errors", *BY_SOURCE)
        return {
            "time": (rows[chosen, 0] + offset).tolist(),
            "hit_rate": _share(count["lookups_hit"], count["lookups_hit"] + count["lookups_miss"]),
            "tokens_per_step": _share(count["generated_tokens"], np.sum([count[name] for name in STEPS], axis=0)),
            "acceptance": _share(count["accepted_tokens"], count["draft_tokens"]),
            "draft_p50": half,
            "draft_p99": most,
            **{name: _share(count[name], seconds) for name in rates},
            **{name: values.tolist() for name, values in contents.items()},
        }


def _share(part: Rows, whole: Rows) -> list[float | None]:
    return [a / b if b > 0 else None for a, b in zip(part.tolist(), whole.tolist(), strict=True)]


def _quantiles(buckets: Rows) -> tuple[list[float | None], list[float | None]]:
    """Returns the median and 99th percentile of each row of cumulative counts."""
    return [_quantile(row, 0.5) for row in buckets], [_quantile(row, 0.99) for row in buckets]


def _quantile(row: Rows, share: float) -> float | None:
    """Returns a quantile as Prometheus computes it: it assumes that values spread evenly over a bucket."""
    rank = share * row[-1]
    if not rank:
        return None
    bucket = int(np.searchsorted(row, rank))
    below = row[bucket - 1] if bucket else 0.0
    part = (rank - below) / (row[bucket] - below)
    return float(LIMITS[bucket] + part * (LIMITS[bucket + 1] - LIMITS[bucket]))
