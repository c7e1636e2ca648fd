"""The demo's draft model, and the demo's table about two drafters.

The tests import torch, not the collection of tests: every process that runs a part of the tests collects all.
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from examples.draft_server import Drafts, Lookups
from examples.tiny_rl import table
from examples.tiny_rl.results import Epoch, Side, promises
from examples.tiny_rl.task import problems, worked_solution

LARGEST = 500_000  # bytes of the shipped file


@pytest.fixture(autouse=True)
def _needs_torch() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")


def texts(count: int) -> list[tuple[list[int], list[int]]]:
    """Returns problems and solutions as the policy was taught to write them, which is faster than sampling."""
    rng = random.Random(12345)
    return [(p.prompt, worked_solution(p, rng, slips=0.3)) for p in problems(count, rng)]


def test_the_shipped_draft_model_is_small_and_nearly_as_good_as_the_policy() -> None:
    import torch

    from examples.tiny_rl import make_drafter, policy

    assert policy.SHIPPED_DRAFTER.stat().st_size < LARGEST
    teacher = policy.load()
    drafter = policy.load(policy.SHIPPED_DRAFTER, policy.DRAFTER)
    best = make_drafter.acceptance(teacher, teacher, texts(32))
    assert make_drafter.acceptance(drafter, teacher, texts(32)) > 0.95 * best
    torch.manual_seed(0)
    assert make_drafter.acceptance(policy.fresh(policy.DRAFTER), teacher, texts(32)) < 0.1


def test_distilling_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    """Thirty batches of eight texts are enough to know the commonest words."""
    from rich.console import Console

    from examples.tiny_rl import make_drafter, policy

    teacher = policy.load()
    drafter = make_drafter.distill(teacher, texts(64), 30, 0, Console())
    assert make_drafter.acceptance(drafter, teacher, texts(8)) > 0.2


def test_random_weights_never_replace_the_shipped_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from examples.tiny_rl import make_drafter, policy

    monkeypatch.setattr("sys.argv", ["make_drafter", "--random"])
    with pytest.raises(SystemExit):
        make_drafter.main()
    monkeypatch.setattr("sys.argv", ["make_drafter", "--random", "--out", str(tmp_path / "useless")])
    make_drafter.main()
    useless = policy.load(tmp_path / "useless", policy.DRAFTER)
    assert make_drafter.acceptance(useless, policy.load(), texts(8)) < 0.1


def side(history: Drafts | None) -> Side:
    """A hundred steps verified 200 tokens and accepted 150: 2.5 tokens per step."""
    return Side([[1.0, 0.0]], 250, 100, 50, 200, 150, 1.0, 1.0, history)


def test_the_table_says_what_each_drafter_gained() -> None:
    epoch = Epoch(1, side(Drafts(120, 90)), side(None), Lookups(0, 2), 0.0)
    _, both, history, drafter = table.rows(epoch)
    assert both[4] == "[bold]2.50[/]"
    assert history[1:6] == ("history", "", "", "+0.90", "75%")
    assert drafter[1:6] == ("drafter", "", "", "+0.60", "75%")
    assert len(history) == len(drafter) == len(table.COLUMNS)
    drafted = epoch.as_json()["with_drafts"]
    assert isinstance(drafted, dict)
    assert drafted["history"] == {"drafted": 120, "accepted": 90}


@pytest.mark.parametrize(
    ("history", "shown"),
    [
        (Drafts(204, 147), ("+0.00", "0%")),
        (Drafts(198, 152), ("+0.00", "0%")),
        (Drafts(199, 147), ("+0.01", "100%")),
        (Drafts(200, 150), ("+0.00", "0%")),
    ],
)
def test_no_drafter_has_less_than_nothing_or_accepts_more_than_it_drafted(
    history: Drafts, shown: tuple[str, str]
) -> None:
    epoch = Epoch(2, side(history), side(None), Lookups(2, 0), 0.0)
    *_, drafter = table.rows(epoch)
    assert drafter[4:6] == shown


def test_without_a_draft_model_the_table_is_as_ever() -> None:
    epoch = Epoch(1, side(None), side(None), Lookups(0, 2), 0.0)
    assert len(table.rows(epoch)) == 2
    drafted = epoch.as_json()["with_drafts"]
    assert isinstance(drafted, dict)
    assert "history" not in drafted


def test_tokens_per_step_may_fall_where_the_draft_model_gives_way() -> None:
    """As on a busy CPU, where its passes cost more than they save: 3.71 tokens in epoch 1, 3.56 in epoch 2."""

    def broken(history: Drafts | None) -> list[str]:
        without = replace(side(None), request_steps=250, engine_steps=125, drafted=0, accepted=0)
        first, later = side(history), replace(side(history), request_steps=110)
        epochs = [
            Epoch(1, first, without, Lookups(0, 2), 1.0),
            Epoch(2, later, without, Lookups(2, 0), 1.0),
        ]
        return [promise.text for promise in promises(epochs) if not promise.kept]

    assert broken(Drafts(200, 150)) == []
    assert broken(None) == ["tokens per step rise from epoch 1 to epoch 2: 2.50 -> 2.27"]
