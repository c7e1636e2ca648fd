"""The handlers of HistoSpec's log lines inside vLLM, with a logger in place of vLLM's. Without vLLM."""

import logging
from collections.abc import Iterator

import pytest

from histospec.client.vllm import logs


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.name}: {record.getMessage()}")


@pytest.fixture
def theirs() -> Iterator[Kept]:
    """Yields the output of vLLM's handler. Both loggers start as in a new process, and are restored afterwards."""
    before = [(x, x.handlers, x.level, x.propagate) for x in (logs.OURS, logs.THEIRS)]
    kept = Kept()
    for logger in (logs.OURS, logs.THEIRS):
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.NOTSET)
    logs.THEIRS.handlers, logs.THEIRS.propagate = [kept], False
    logs.THEIRS.setLevel(logging.INFO)
    yield kept
    for logger, handlers, level, propagate in before:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_lines_go_where_those_of_vllm_go(theirs: Kept) -> None:
    for _ in range(3):
        logs.join_vllm()
    logging.getLogger("histospec.client").info("HistoSpec: %s", "connected")
    logging.getLogger("histospec.client").debug("HistoSpec: details")
    logging.getLogger("histospec.vllm").warning("HistoSpec: away")
    assert theirs.lines == ["INFO histospec.client: HistoSpec: connected", "WARNING histospec.vllm: HistoSpec: away"]


def test_a_later_configuration_of_vllm_holds(theirs: Kept) -> None:
    logs.join_vllm()
    later = Kept()
    logs.THEIRS.handlers = [later]
    logs.THEIRS.setLevel(logging.WARNING)
    logging.getLogger("histospec.client").info("connected")
    logging.getLogger("histospec.client").warning("away")
    assert (theirs.lines, later.lines) == ([], ["WARNING histospec.client: away"])


@pytest.mark.parametrize("configured", ["handler", "level", "propagation"])
def test_what_the_user_configured_is_left_alone(theirs: Kept, configured: str) -> None:
    own = Kept()
    if configured == "handler":
        logs.OURS.addHandler(own)
    elif configured == "level":
        logs.OURS.setLevel(logging.ERROR)
    else:
        logs.OURS.propagate = False
    before = (list(logs.OURS.handlers), logs.OURS.level, logs.OURS.propagate)
    logs.join_vllm()
    assert (logs.OURS.handlers, logs.OURS.level, logs.OURS.propagate) == before
    logging.getLogger("histospec.client").warning("away")
    assert theirs.lines == []
    assert bool(own.lines) == (configured == "handler")
