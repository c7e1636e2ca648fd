"""Rejected callers: one warning a minute for each reason, within bounds, and what the status page has of them."""

from collections.abc import Mapping, Sequence

import pytest
import structlog

from histospec.server.security import rejections
from histospec.server.security.rejections import EVERY, KINDS, LATELY, Rejections


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Sequence[Mapping[str, object]]:
    capture = structlog.testing.LogCapture()
    monkeypatch.setattr(rejections, "log", structlog.wrap_logger(None, processors=[capture]))
    return capture.entries


def test_a_caller_that_tries_for_ever_causes_one_warning_a_minute(lines: Sequence[Mapping[str, object]]) -> None:
    rejected = Rejections()
    for second in range(130):
        rejected.add("Draft", "UNAUTHENTICATED", f"ipv4:10.0.0.1:{second}", "token 'a' was removed", now=second)
    assert [(line["log_level"], line["event"], line["reason"], line["calls"]) for line in lines] == [
        ("warning", "rpc refused", "token 'a' was removed", calls) for calls in (1, EVERY + 1, 2 * EVERY + 1)
    ]
    (kind,) = rejected.lately(now=130)
    assert (kind.calls, kind.peer) == (130, "ipv4:10.0.0.1:129")
    assert rejected.lately(now=130 + LATELY) == []


def test_a_caller_with_many_tokens_fills_neither_the_log_nor_the_memory(lines: Sequence[Mapping[str, object]]) -> None:
    rejected = Rejections()
    for number in range(1000):
        rejected.add("Draft", "UNAUTHENTICATED", "ipv4:10.0.0.1:1", f"sha256 begins with {number}", now=0.001 * number)
    assert len(lines) == 20
    assert len(rejected.lately(now=1.0)) == KINDS
