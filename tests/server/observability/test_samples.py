"""The last hour in a ring, and the series computed from its counters."""

import math

import pytest

from histospec.server.observability.metrics import SECONDS
from histospec.server.observability.samples import CONTENTS, COUNTED, EVERY, HOUR, Sample, Samples

NOTHING = dict.fromkeys((*COUNTED, *CONTENTS), 0.0)
NO_STEPS = [0.0] * (len(SECONDS) + 1)


def filled(count: int, **rates: float) -> Samples:
    """Adds samples whose counters grow by this much each."""
    samples = Samples()
    for i in range(count):
        values = NOTHING | {name: i * rate for name, rate in rates.items()}
        samples.add(Sample(1000 + EVERY * i, values, NO_STEPS))
    return samples


def test_before_anything_is_counted() -> None:
    samples = filled(1)
    assert samples.totals() == NOTHING
    assert samples.series()["time"] == []
    recent = samples.recent()
    assert (recent["seconds"], recent["lookups_hit"], recent["draft_p99"]) == (0, 0, None)


def test_shares_and_rates_are_of_the_time_between_points() -> None:
    values = {"lookups_hit": 3, "lookups_miss": 1, "generated_tokens": 30, "drafts_hit": 8, "drafts_empty": 2}
    series = filled(3, **values, draft_tokens=50, accepted_tokens=20, sessions=7).series()
    assert series["time"] == [1005, 1010]
    assert series["hit_rate"] == [0.75, 0.75]
    assert series["tokens_per_step"] == [3, 3]
    assert series["acceptance"] == [0.4, 0.4]
    assert series["draft_tokens"] == [10, 10]  # per second
    assert series["sessions"] == [7, 14]  # values at that moment
    assert filled(3).series()["hit_rate"] == [None, None]


def test_points_are_averages_that_lose_nothing() -> None:
    samples = filled(700, ingested_tokens=10, index_bytes=2)
    series = samples.series(points=120)
    assert 100 <= len(series["time"]) <= 120
    assert series["time"][-1] == 1000 + 699 * EVERY
    assert series["index_bytes"][-1] == 2 * 699
    assert set(series["ingested_tokens"]) == {10 / EVERY}
    assert {len(values) for values in series.values()} == {len(series["time"])}


def test_an_hour_is_kept_and_no_more() -> None:
    samples = filled(2000, generated_tokens=1)
    times = samples.series(points=10_000)["time"]
    assert (times[-1] or 0) - (times[0] or 0) == HOUR - EVERY
    assert samples.totals()["generated_tokens"] == 1999
    # Rare samples, as with a large index, are kept for as long, so there are fewer.
    rare = Samples()
    for i in range(1000):
        rare.add(Sample(60.0 * i, NOTHING, NO_STEPS))
    assert len(rare.series(points=10_000)["time"]) == HOUR / 60


def test_recent_is_of_the_last_ten_minutes() -> None:
    recent = filled(700, generated_tokens=5).recent()
    assert recent["seconds"] == 600
    assert recent["generated_tokens"] == 5 * 600 / EVERY


def test_quantiles_come_from_the_histogram() -> None:
    samples = Samples()
    samples.add(Sample(0, NOTHING, [100.0] * len(NO_STEPS)))  # all before the first sample
    # 98 steps of 1 to 2.5 ms, one of 5 to 10 ms, one beyond the last bucket.
    buckets = [100.0 + 98 * (s >= 0.0025) + (s >= 0.01) + (s == math.inf) for s in (*SECONDS, math.inf)]
    samples.add(Sample(5, NOTHING, buckets))
    [median], [most] = (samples.series()[name] for name in ("draft_p50", "draft_p99"))
    assert median == pytest.approx(0.001 + 0.0015 * 50 / 98)
    assert most == pytest.approx(0.01)
    assert samples.recent()["draft_p99"] == most
