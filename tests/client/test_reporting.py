"""The adapter's line per minute: its numbers, and its times. Without vLLM."""

import math

import pytest

from histospec.client.engines.reporting import MINUTE, WAITS, MinuteReport


def test_the_numbers_are_those_of_the_steps() -> None:
    report = MinuteReport()
    assert report.line(1000.0, 0.05, False) is None
    for _ in range(100):
        # Three requests: a chunk of a prompt, one without a draft, and one with three of four draft tokens accepted.
        report.stepped(0.25, [[], [1], [1, 2, 3, 4]], 4)
        report.received(0.002, 2, [[], [5, 6, 7, 8], []])
    report.received(0.05, 2, [[], []])
    speed_up = 500 / (200 + 0.1 * 400)
    assert report.line(1000.0 + MINUTE, 0.1, True) == (
        "HistoSpec: in 25 s of generating 2.50 tokens per step of a request, 75% of 400 drafted tokens accepted, "
        "drafts for 50% of the requests that asked, verify cost 0.100 (measured), waited for drafts 2.5 ms per step "
        f"(p99 2.0 ms), estimated speed-up {speed_up:.2f}"
    )


def test_the_next_minute_starts_from_nothing() -> None:
    report = MinuteReport()
    report.line(0.0, 0.05, False)
    report.stepped(1.0, [[1, 2]], 1)
    report.received(0.001, 1, [[2]])
    assert "2.00 tokens per step" in str(report.line(MINUTE, 0.05, False))
    report.stepped(1.0, [[1]], 0)
    assert report.line(2 * MINUTE - 1, 0.05, False) is None
    line = report.line(2 * MINUTE, 0.05, False)
    assert line == (
        "HistoSpec: in 1 s of generating 1.00 tokens per step of a request, no drafts asked for, verify cost 0.050 "
        "(assumed), estimated speed-up 1.00"
    )


def test_the_end_of_a_short_trial_has_a_line() -> None:
    report = MinuteReport()
    assert report.rest(0.05, False) is None
    report.line(0.0, 0.05, False)
    report.stepped(2.0, [[1, 2, 3]], 2)
    assert report.line(MINUTE - 1, 0.05, False) is None
    line = report.rest(0.05, False)
    assert str(line).startswith("HistoSpec: in 2 s of generating 3.00 tokens per step of a request, 100% of 2 drafted")
    assert report.rest(0.05, False) is None


def test_requests_without_a_session_are_counted_by_what_they_do() -> None:
    report = MinuteReport()
    report.line(0.0, 0.05, False)
    for _ in range(3):
        report.left_out("score their prompt")
    report.left_out("ask for one token")
    assert report.line(MINUTE, 0.05, False) is None  # without a step there is no line, and no count is lost
    report.stepped(1.0, [[1]], 0)
    line = str(report.line(MINUTE, 0.05, False))
    assert line.endswith("speed-up 1.00, without a session: 3 score their prompt, 1 ask for one token")
    report.stepped(1.0, [[1]], 0)
    assert "session" not in str(report.line(2 * MINUTE, 0.05, False))


def test_an_idle_engine_says_nothing() -> None:
    report = MinuteReport()
    report.line(0.0, 0.05, False)
    assert report.line(10 * MINUTE, 0.05, False) is None
    report.stepped(-math.inf, [[1]], 0)  # the first step after hours
    report.stepped(math.inf, [[1]], 0)
    assert str(report.line(10 * MINUTE, 0.05, False)).startswith("HistoSpec: in 0 s of generating 1.00 tokens")
    report.stepped(1.0, [[]], 0)  # pieces of a prompt alone
    assert report.line(20 * MINUTE, 0.05, False) is None


def test_lines_are_a_minute_apart() -> None:
    report = MinuteReport()
    lines = []
    for tenth in range(6000):
        report.stepped(0.1, [[1, 2]], 1)
        lines += [tenth] if report.line(tenth / 10, 0.05, False) else []
    assert lines == [600 * minute for minute in range(1, 10)]


@pytest.mark.parametrize("steps", [1, 50, 3 * WAITS])
def test_what_is_kept_is_bounded(steps: int) -> None:
    report = MinuteReport()
    report.line(0.0, 0.05, False)
    for step in range(steps):
        report.stepped(0.001, [[1]], 0)
        report.received(step / 1e6, 1, [[]])
    assert len(report._waits) == min(steps, WAITS)
    assert "drafts for 0% of the requests that asked" in str(report.line(MINUTE, 0.05, False))
