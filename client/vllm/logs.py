"""Lets the lines of HistoSpec go where vLLM's go.

vLLM configures its own logger alone, so what others log inside it comes without time, level and name, or not at all.
"""

import logging

OURS, THEIRS = logging.getLogger("histospec"), logging.getLogger("vllm")


class _ToVllm(logging.Handler):
    """Gives every line to vLLM's logger, whatever handlers that has by then."""

    def emit(self, record: logging.LogRecord) -> None:
        if THEIRS.isEnabledFor(record.levelno):
            THEIRS.handle(record)


def join_vllm() -> None:
    """Makes the logger `histospec` use the handlers and the level of `vllm`; one that is configured is left alone."""
    if any(isinstance(handler, _ToVllm) for handler in OURS.handlers):
        OURS.setLevel(THEIRS.getEffectiveLevel())  # which may have changed
    elif not OURS.handlers and OURS.level == logging.NOTSET and OURS.propagate:
        OURS.addHandler(_ToVllm())
        OURS.setLevel(THEIRS.getEffectiveLevel())
        OURS.propagate = False
