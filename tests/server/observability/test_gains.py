"""The gain from drafts, computed from counters, and its main limit."""

from typing import Any

import pytest

from histospec.protocol.gains import gain
from histospec.server.observability.runs import why_not_more

COUNTED = {
    "lookups_hit": 90, "lookups_miss": 10, "misnamed_lookups": 0, "drafts_hit": 300, "drafts_empty": 100,
    "undrafted_tokens": 0, "generated_tokens": 1000, "draft_tokens": 1000, "accepted_tokens": 600,
    "verify_microsteps": 100_000_000,
}  # fmt: skip


def test_ratios() -> None:
    some = gain(COUNTED)
    assert some._asdict() == {
        "steps": 400, "generated": 1000, "tokens_per_step": 2.5, "speedup": 2.0, "acceptance": 0.6, "empty": 0.25,
        "undrafted": 0.0, "known": 0.9,
    }  # fmt: skip


def test_the_speedup_needs_the_price_of_each_step() -> None:
    assert gain(COUNTED | {"verify_microsteps": 600_000_000}).speedup == 1
    assert gain({name: number for name, number in COUNTED.items() if name != "verify_microsteps"}).speedup is None


def test_steps_without_drafts_count() -> None:
    """A run that mostly has no drafts gains little, however good the few drafts are."""
    some = gain(COUNTED | {"generated_tokens": 4600, "undrafted_tokens": 3600})
    assert (some.steps, some.undrafted) == (4000, 0.9)
    assert some.tokens_per_step == pytest.approx(1.15)
    assert some.speedup == pytest.approx(4600 / 4100)


def test_nothing_to_divide_by() -> None:
    some = gain(dict.fromkeys(COUNTED, 0))
    assert set(some._asdict().values()) == {0, None}


@pytest.mark.parametrize(
    ("changes", "cost", "reason"),
    [
        ({}, 0.1, ""),
        ({"drafts_hit": 10, "drafts_empty": 9, "accepted_tokens": 0}, 0.1, ""),  # too few steps
        ({}, 0.6, "verifying a draft token costs 0.60 of a step without drafts"),
        ({"undrafted_tokens": 400}, 0.1, "in 50% of the steps, no draft was asked for: it would not have paid"),
        ({"lookups_hit": 20, "lookups_miss": 80}, 0.1, "80% of the sessions have a problem without history"),
        ({"lookups_hit": 0, "lookups_miss": 19}, 0.1, ""),
        (
            {"lookups_hit": 0, "lookups_miss": 100, "misnamed_lookups": 60},
            0.1,
            "60% of the sessions have a prompt that is known under other problem ids",
        ),
        ({"drafts_hit": 100, "drafts_empty": 300}, None, "75% of the drafts are empty"),
        ({"accepted_tokens": 300}, 0.1, "30% of the draft tokens are accepted"),
    ],
)
def test_the_main_reason(changes: dict[str, Any], cost: float | None, reason: str) -> None:
    counted = COUNTED | changes
    said = why_not_more(gain(counted), counted, cost)
    assert said.startswith(reason)
    assert bool(said) is bool(reason)


def test_late_drafts_and_drafts_not_asked_for_are_two_causes() -> None:
    counted = COUNTED | {"undrafted_tokens": 400}
    late = why_not_more(gain(counted), counted, 0.1, late=0.1)
    asked = why_not_more(gain(counted), counted, 0.1, late=0.09)
    assert late == "50% of the steps ran without a draft, because drafts come too late"
    assert "no draft was asked for" in asked
    assert "late" not in asked


def test_the_policy_is_not_blamed_for_what_sampling_does() -> None:
    counted = COUNTED | {"accepted_tokens": 300}
    moved = why_not_more(gain(counted), counted, 0.1)
    sampled = why_not_more(gain(counted), counted, 0.1, same_weights=True)
    assert moved.endswith("the policy writes other text than before")
    assert sampled.endswith("the same weights sample other text than before")
