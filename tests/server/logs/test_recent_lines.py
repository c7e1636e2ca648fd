"""The log lines on the status page."""

from typing import Any

import structlog

from histospec.protocol.redaction import without_secrets
from histospec.server.logs.lines import EACH, LINES, LONGEST, RecentLines


def _whole(logger: object, method: str, line: Any) -> Any:
    return (line,), {}


def test_warnings_and_errors_are_kept_and_passed_on() -> None:
    recent = RecentLines()
    log = structlog.wrap_logger(
        structlog.ReturnLogger(), processors=[structlog.processors.add_log_level, recent, _whole]
    )
    assert log.warning("the store is away", reason="no route", left_out=3)["reason"] == "no route"
    log.info("stored", tokens=5)
    try:
        raise ValueError("token 4711 of a text")
    except ValueError:
        log.exception("rpc failed", method="Draft")
    error, warning = recent.newest_first()
    assert warning == {
        "time": "", "level": "warning", "event": "the store is away", "details": "reason: no route, left_out: 3",
    }  # fmt: skip
    assert error["level"] == "error"
    assert error["details"] == "method: Draft, error: ValueError"


def test_so_many_and_no_longer() -> None:
    recent = RecentLines()
    for number in range(LINES + 5):
        recent(None, "warning", {"level": "warning", "event": f"{number} {'x' * 9999}", "number": number})
    lines = recent.newest_first()
    assert [line["details"] for line in (lines[0], lines[-1])] == [f"number: {LINES + 4}", "number: 5"]
    assert len(lines[0]["event"]) == LONGEST


def test_secrets_are_left_out() -> None:
    text = "redis://user:pa55@host:6379/0 refused Bearer abc.def; password=hunter2, Token: x1 but tokens stay"
    assert without_secrets(text) == "redis://…@host:6379/0 refused Bearer …; password=…, Token: … but tokens stay"


def test_many_lines_of_one_kind_do_not_hide_others() -> None:
    recent = RecentLines()
    recent(None, "error", {"level": "error", "event": "the disk fails"})
    for number in range(LINES + 5):
        recent(None, "warning", {"level": "warning", "event": "rpc refused", "number": number})
    lines = recent.newest_first()
    assert next(line["details"] for line in lines if line["event"] == "rpc refused") == f"number: {LINES + 4}"
    assert len(lines) == EACH + 1
    assert lines[-1]["event"] == "the disk fails"
