"""Structured logs on stderr: pretty on a terminal, one JSON object a line otherwise."""

import logging
import sys

import structlog
from structlog.typing import Processor


def configure(form: str, level: str) -> None:
    """Sets up structlog for the process; `form` is auto, pretty or json. Call once, from a command."""
    pretty = sys.stderr.isatty() if form == "auto" else form == "pretty"
    render: list[Processor] = (
        [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
        if pretty
        else [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=not pretty),
            *render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()])
        if hasattr(logging, "getLevelNamesMapping")
        else structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
