"""Settings that the adapters of all engines share, and how they read the environment."""

import logging
import os

from histospec.client import arguments
from histospec.client.config import configure, switch
from histospec.client.errors import ConfigurationError
from histospec.protocol.limits import DEFAULT_MAX_DRAFT

DRAFT_TOKENS = 16
"""The longest draft that HISTOSPEC_ENABLE=1 fills in."""


def enabled() -> bool:
    """Returns whether an engine's settings for drafts are filled in. Raises ValueError if the variable is invalid."""
    return switch("HISTOSPEC_ENABLE", default=False)


def may_fill_in(obstacle: str | None, logger: logging.Logger) -> bool:
    """Returns whether HISTOSPEC_ENABLE=1 fills in the settings of an engine. Logs what keeps it from that.

    Raises:
        ConfigurationError: a setting of HistoSpec's own is missing or invalid. That is no outage: without an endpoint
            there would never be a draft.
    """
    if obstacle is not None:
        logger.warning(
            "HistoSpec: HISTOSPEC_ENABLE is 1, but this engine starts WITHOUT drafts from the server: %s", obstacle
        )
        return False
    try:
        configure()
    except ConfigurationError as error:
        raise ConfigurationError(f"HISTOSPEC_ENABLE is 1, but {error}") from None
    return True


def draft_tokens() -> int:
    """Returns the longest draft that is filled in. Raises ValueError if HISTOSPEC_DRAFT_TOKENS is invalid."""
    return tokens("HISTOSPEC_DRAFT_TOKENS", 1) or DRAFT_TOKENS


def tokens(name: str, least: int, auto: bool = False) -> int | None:
    """Returns a number of tokens; None if the variable is empty, or "auto" where that is allowed."""
    text = os.environ.get(name, "")
    if not text or (auto and text == "auto"):
        return None
    if not text.isdecimal() or not least <= int(text) <= DEFAULT_MAX_DRAFT:
        either = "'auto' or " if auto else ""
        raise ValueError(
            f"{name}: expected {either}an integer from {least} to {DEFAULT_MAX_DRAFT}, got {arguments.shown(text)}"
        )
    return int(text)
