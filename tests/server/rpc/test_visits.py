"""Which epoch an update of SpecRL's updater gets, by burst."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial

import pytest

from histospec.server.rpc.specrl import BURST_SECONDS, PAUSE_SECONDS, Visits


class Clock:
    """Stands still until told otherwise."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Trainer:
    """Sends updates to a namespace whose newest epoch they alone advance."""

    def __init__(self, most_prompts: int = 100) -> None:
        self.clock = Clock()
        self.newest = 0
        self.visits = Visits(self.clock, most_prompts)

    def visit(self, prompt: int, burst: int) -> int:
        self.newest = self.visits.epoch(prompt, burst, self.newest)
        self.visits.note(prompt, burst, self.newest)
        return self.newest

    def update(self, prompt: int) -> int:
        with self.visits.update() as burst:
            return self.visit(prompt, burst)

    def updates(self, prompts: Iterable[int]) -> list[int]:
        return [self.update(prompt) for prompt in prompts]

    def together(self, prompts: Iterable[int]) -> list[Callable[[], int]]:
        """Updates that arrive now and get their epochs when they are called."""
        arrived: list[Callable[[], int]] = []
        with ExitStack() as running:
            for prompt in prompts:
                burst = running.enter_context(self.visits.update())
                arrived.append(partial(self.visit, prompt, burst))
        return arrived

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


def test_a_burst_advances_the_epoch_at_most_once(trainer: Trainer) -> None:
    assert trainer.updates([1, 2, 1, 1, 2, 3, 3]) == [0] * 7
    trainer.wait(PAUSE_SECONDS)
    assert trainer.updates([4, 4, 1, 1, 2, 4, 3, 3, 1]) == [0, 0, 1, 1, 1, 1, 1, 1, 1]
    trainer.wait(PAUSE_SECONDS)
    assert trainer.updates([4, 5, 5, 1]) == [2, 2, 2, 2]


def test_a_shorter_pause_ends_no_burst(trainer: Trainer) -> None:
    for _ in range(5):
        assert trainer.update(1) == 0
        trainer.wait(0.9 * PAUSE_SECONDS)


def test_a_burst_goes_on_while_an_update_waits(trainer: Trainer) -> None:
    with trainer.visits.update() as first:
        trainer.wait(10 * PAUSE_SECONDS)
        with trainer.visits.update() as second:
            assert first == second
        trainer.wait(10 * PAUSE_SECONDS)
    trainer.wait(0.9 * PAUSE_SECONDS)
    with trainer.visits.update() as third:
        assert third == first
    trainer.wait(PAUSE_SECONDS)
    with trainer.visits.update() as fourth:
        assert fourth > first


def test_epochs_advance_without_a_pause(trainer: Trainer) -> None:
    step = PAUSE_SECONDS / 2
    seen = []
    for _ in range(round(3.5 * BURST_SECONDS / step)):
        seen.append(trainer.update(1))
        trainer.wait(step)
    assert sorted(set(seen)) == [0, 1, 2, 3]


def test_an_update_of_an_older_burst_advances_nothing(trainer: Trainer) -> None:
    """It waited for room while the next burst began."""
    (late, *_) = trainer.together([1, 2])
    trainer.wait(PAUSE_SECONDS)
    assert trainer.updates([1, 1]) == [0, 0]
    assert late() == 0
    trainer.wait(PAUSE_SECONDS)
    (next_one, another) = trainer.together([1, 2])
    assert next_one() == 1
    assert late() == 1
    assert another() == 1
    trainer.wait(PAUSE_SECONDS)
    assert trainer.updates([1, 2]) == [2, 2]


def test_two_bursts_at_once_advance_once_each(trainer: Trainer) -> None:
    trainer.updates([1, 2])
    trainer.wait(PAUSE_SECONDS)
    old = trainer.together([1, 2, 3])
    trainer.wait(PAUSE_SECONDS)
    new = trainer.together([1, 2, 3])
    assert [old[0](), new[0](), old[1](), new[1](), new[2](), old[2]()] == [1, 2, 2, 2, 2, 2]


def test_an_epoch_that_another_caller_gave_is_followed(trainer: Trainer) -> None:
    assert trainer.updates([1, 2]) == [0, 0]
    trainer.newest = 40
    assert trainer.updates([1, 1]) == [40, 40]
    trainer.wait(PAUSE_SECONDS)
    trainer.newest = 7  # a rewind
    assert trainer.updates([1, 2]) == [7, 7]


def test_prompts_are_bounded() -> None:
    assert Trainer(most_prompts=3).updates(range(7)) == [0, 0, 0, 1, 1, 1, 2]
