"""Sends HistoSpec's log lines to vLLM's log.

vLLM configures only its own logger, so lines of other loggers appear without time, level and name, or not at all.
"""

import logging

OURS, THEIRS = logging.getLogger("histospec"), logging.getLogger("vllm")


class _ToVllm(logging.Handler):
    """Passes every line to the handlers that vLLM's logger has at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        if THEIRS.isEnabledFor(record.levelno):
            THEIRS.handle(record)


def join_vllm() -> None:
    """Makes the logger `histospec` use the handlers and the level of `vllm`, unless it is configured already."""
    if any(isinstance(handler, _ToVllm) for handler in OURS.handlers):
        OURS.setLevel(THEIRS.getEffectiveLevel())  # it may have changed
    elif not OURS.handlers and OURS.level == logging.NOTSET and OURS.propagate:
        OURS.addHandler(_ToVllm())
        OURS.setLevel(THEIRS.getEffectiveLevel())
        OURS.propagate = False
