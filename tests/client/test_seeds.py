"""Seeds are a function of sample and epoch, and are renewed as often as the SeedPolicy says."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from histospec.client.seeds import SeedPolicy

SAMPLES = [b"problem-%d/%d" % (i // 8, i % 8) for i in range(2000)]


def renewals(policy: SeedPolicy, epochs: int) -> NDArray[np.bool_]:
    """Returns bool[epochs - 1, samples]: whether the seed of a sample differs from the epoch before."""
    seeds = np.array([[policy.seed(sample, epoch) for sample in SAMPLES] for epoch in range(epochs)])
    assert len(np.unique(seeds[0])) == len(SAMPLES)
    assert seeds.min() >= 0
    renewed: NDArray[np.bool_] = seeds[1:] != seeds[:-1]
    return renewed


@pytest.mark.parametrize("refresh", [0.25, 0.5, 0.75])
def test_the_share_is_renewed_each_epoch(refresh: float) -> None:
    renewed = renewals(SeedPolicy(refresh), 12)
    five_deviations = 5 * np.sqrt(refresh * (1 - refresh) / len(SAMPLES))
    assert np.abs(renewed.mean(1) - refresh).max() < five_deviations
    # Renewals of different visits are independent.
    assert abs(renewed[1:][renewed[:-1]].mean() - refresh) < five_deviations


def test_none_and_all() -> None:
    assert not renewals(SeedPolicy(0), 6).any()
    assert renewals(SeedPolicy(1), 6).all()


def test_an_age_is_not_exceeded_and_samples_take_turns() -> None:
    renewed = renewals(SeedPolicy(0, max_age=4), 13)
    assert (renewed.reshape(3, 4, -1).sum(1) == 1).all()
    assert np.abs(renewed.mean(1) - 1 / 4).max() < 0.1


def test_versions_within_a_visit_share_seeds() -> None:
    policy, finer = SeedPolicy(0.5), SeedPolicy(0.5, every=10)
    assert [finer.seed(SAMPLES[0], step) for step in range(50)] == [policy.seed(SAMPLES[0], i // 10) for i in range(50)]


@pytest.mark.parametrize(
    ("field", "value"), [("refresh", -0.1), ("refresh", 1.1), ("refresh", float("nan")), ("max_age", 0), ("every", 0)]
)
def test_what_cannot_be_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        SeedPolicy(**{field: value})
