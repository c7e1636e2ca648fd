"""The draft engine in process: history, live text and drafts, without a server."""

from histospec.native._core import AGES, COUNTERS, SOURCES, STEPPED, TOO_LONG, UNKNOWN, Engine

__all__ = ["AGES", "COUNTERS", "SOURCES", "STEPPED", "TOO_LONG", "UNKNOWN", "Engine"]
