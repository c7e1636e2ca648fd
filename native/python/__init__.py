"""The engine of a draft server, in process."""

from histospec.native._core import AGES, COUNTERS, SOURCES, STEPPED, TOO_LONG, UNKNOWN, Engine

__all__ = ["AGES", "COUNTERS", "SOURCES", "STEPPED", "TOO_LONG", "UNKNOWN", "Engine"]
