"""The clock that costs are learned from."""

import math
import threading

from histospec.client.vllm.choice.prices import StepClock


def test_no_lap_across_idleness() -> None:
    for computes_here in (False, True):
        clock = StepClock(computes_here)
        assert clock.lap() == -math.inf
        assert 0 <= clock.lap() < math.inf
        clock.idle()
        assert clock.lap() == -math.inf


def test_waiting_for_others_is_no_cost_of_the_cpu() -> None:
    """The thread waits, as it does while another program has the core."""
    cpu, wall = StepClock(computes_here=True), StepClock(computes_here=False)
    for clock in (cpu, wall):
        clock.lap()
    threading.Event().wait(0.2)
    assert cpu.lap() < wall.lap()
