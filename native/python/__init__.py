"""The engine of a draft server, in process."""

from histospec.native._core import Engine

__all__ = ["Engine"]
