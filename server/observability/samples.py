"""The last hour of one server, as a ring of samples: counters as they stood, and what was held."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from histospec.native import SOURCES
from histospec.server.observability.gains import STEPS
from histospec.server.observability.metrics import SECONDS

EVERY = 5.0  # seconds between samples
HOUR = 3600.0
SMOOTH = 60.0  # seconds that a point of a series looks back: sessions open in bursts
RECENT = 600.0  # seconds that count as now, for the figures that say how things are going

EVICTED = ("evicted_by_memory", "evicted_by_epochs", "evicted_by_responses")
BY_SOURCE = tuple(f"{source}.{name}" for source in SOURCES for name in ("draft_tokens", "accepted_tokens"))
COUNTED = (
    "lookups_hit", "lookups_miss", "twins_hit", "twins_miss", *STEPS, "draft_tokens", "accepted_tokens",
    "generated_tokens", *EVICTED, "ingested_responses", "ingested_tokens", "store_errors", *BY_SOURCE,
)  # fmt: skip
"""What only grows."""
HELD = ("sessions", "streams", "index_bytes", "history_tokens")
"""What comes and goes."""

Rows = NDArray[np.float64]
Series = dict[str, list[float | None]]
LIMITS = np.array((0.0, *SECONDS, SECONDS[-1]))  # of the histogram's buckets; the last one has no upper limit


class Sample(NamedTuple):
    """What one look found."""

    time: float
    """Seconds of a clock that never jumps."""
    values: Mapping[str, float]
    """Every name of COUNTED and HELD."""
    buckets: Sequence[float]
    """Steps by the time they took in the engine: len(SECONDS) + 1 cumulative counts, as a histogram has them."""


class Samples:
    """At most an hour of them, some 300 KB, however many problems there are."""

    def __init__(self) -> None:
        self._rows: deque[Rows] = deque(maxlen=int(HOUR / EVERY) + 1)

    def add(self, sample: Sample) -> None:
        """Takes the next one, in place of the last where that came early; those older than an hour go."""
        rows = self._rows
        if len(rows) > 1 and rows[-1][0] - rows[-2][0] < EVERY:
            rows.pop()
        values = [sample.values[name] for name in (*COUNTED, *HELD)]
        rows.append(np.array([sample.time, *values, *sample.buckets]))
        while rows[0][0] < sample.time - HOUR:
            rows.popleft()

    def totals(self) -> dict[str, float]:
        """What the last sample found."""
        return dict(zip((*COUNTED, *HELD), self._rows[-1][1:].tolist(), strict=False))

    def recent(self) -> dict[str, float | None]:
        """What was counted in the last RECENT seconds, or since the first sample, with `seconds`, how many that are.

        `draft_p50` and `draft_p99` are in seconds; None where there was no step.
        """
        last = self._rows[-1]
        first = next(row for row in self._rows if row[0] >= last[0] - RECENT)
        change = last - first
        half, most = _quantiles(change[None, 1 + len(COUNTED) + len(HELD) :])
        counted: dict[str, float | None] = dict(zip(COUNTED, change[1:].tolist(), strict=False))
        return counted | {"seconds": float(change[0]), "draft_p50": half[0], "draft_p99": most[0]}

    def series(self, points: int = 120, offset: float = 0.0) -> Series:
        """The hour in at most so many points, oldest first; each is about the minute before it.

        `time` is that of the samples plus `offset`; shares as fractions, None where there was nothing to divide by;
        tokens and responses a second; `draft_p50` and `draft_p99` in seconds; what is held as it was.
        """
        rows = np.stack(self._rows)
        every = max(1, -(-(len(rows) - 1) // points))
        chosen = np.arange(len(rows) - 1, 0, -every)[::-1]  # the last one is always among them
        before = np.searchsorted(rows[:, 0], rows[chosen, 0] - max(SMOOTH, every * EVERY))
        change = rows[chosen] - rows[np.minimum(before, chosen - 1)]
        seconds = change[:, 0]
        count = dict(zip(COUNTED, change[:, 1:].T, strict=False))
        held = dict(zip(HELD, rows[chosen, 1 + len(COUNTED) :].T, strict=False))
        half, most = _quantiles(change[:, 1 + len(COUNTED) + len(HELD) :])
        rates = ("draft_tokens", "accepted_tokens", "ingested_tokens", *EVICTED, "store_errors", *BY_SOURCE)
        return {
            "time": (rows[chosen, 0] + offset).tolist(),
            "hit_rate": _share(count["lookups_hit"], count["lookups_hit"] + count["lookups_miss"]),
            "tokens_per_step": _share(count["generated_tokens"], np.sum([count[name] for name in STEPS], axis=0)),
            "acceptance": _share(count["accepted_tokens"], count["draft_tokens"]),
            "draft_p50": half,
            "draft_p99": most,
            **{name: _share(count[name], seconds) for name in rates},
            **{name: values.tolist() for name, values in held.items()},
        }


def _share(part: Rows, whole: Rows) -> list[float | None]:
    return [a / b if b > 0 else None for a, b in zip(part.tolist(), whole.tolist(), strict=True)]


def _quantiles(buckets: Rows) -> tuple[list[float | None], list[float | None]]:
    """Median and 99th percentile of each row of cumulative counts."""
    return [_quantile(row, 0.5) for row in buckets], [_quantile(row, 0.99) for row in buckets]


def _quantile(row: Rows, share: float) -> float | None:
    """As Prometheus has it: in a bucket, as if its times were spread evenly."""
    rank = share * row[-1]
    if not rank:
        return None
    bucket = int(np.searchsorted(row, rank))
    below = row[bucket - 1] if bucket else 0.0
    part = (rank - below) / (row[bucket] - below)
    return float(LIMITS[bucket] + part * (LIMITS[bucket + 1] - LIMITS[bucket]))
