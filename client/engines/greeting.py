"""An adapter's checks and log lines when an engine starts: which shards answer, and what they know."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from histospec.client import DraftClient, Inspection

logger = logging.getLogger("histospec.engines")

PATIENCE = 2.0  # seconds for each shard; all are asked in parallel


def greet(client: "DraftClient", max_tokens: int, setting: str, also: str = "") -> None:
    """Asks every shard for its facts and logs them. For a shard that does not answer, the client logs a warning.

    Args:
        client: a client that has not called the server yet.
        max_tokens: the longest draft that the engine verifies, in tokens.
        setting: the engine's name of that limit.
        also: what the line of a shard says of the engine, after the drafts' length.

    Raises:
        ValueError: max_tokens exceeds the limit of a shard, or a file of the client's settings cannot be read.
    """
    try:
        found = client.greet(PATIENCE)
    except ValueError:
        raise
    except Exception as error:  # e.g. in a forked process
        logger.warning("HistoSpec: %s; going on WITHOUT drafts", error)
        return
    for shard in found:
        limit = shard.limits.get("draft_tokens", max_tokens)
        if max_tokens > limit:
            client.shutdown()
            raise ValueError(
                f"HistoSpec: {setting} is {max_tokens}; must be at most {limit}, the --max-draft-tokens "
                f"of {shard.shard}"
            )
    namespace = client.config.namespace
    for shard in found:
        known = 0 if shard.namespace is None else shard.namespace.problems
        logger.info(
            "HistoSpec: connected to %s (%s), %d problem%s known%s in namespace %s; drafts of up to %d tokens%s",
            shard.shard, shard.version, known, "" if known == 1 else "s", "" if shard.loaded else " so far", namespace,
            max_tokens, also,
        )  # fmt: skip
        if "write" not in shard.rights:
            logger.warning(
                "HistoSpec: the token may not write in namespace %r; %s stores no responses of this engine",
                namespace, shard.shard,
            )  # fmt: skip
    if found and all(shard.loaded for shard in found):
        _doubt(namespace, found)


def _doubt(namespace: str, found: "Sequence[Inspection]") -> None:
    """Warns of a namespace that may be meant instead, unless sessions of this one have found history."""
    if any(shard.namespace is not None and shard.namespace.lookups_hit for shard in found):
        return
    shared = [other for shard in found for other in shard.shared]
    similar = [name for shard in found for name in shard.similar]
    if shared:
        most = max(shared, key=lambda other: other.prompts)
        logger.warning(
            "HistoSpec: %d of the last %d prompts of namespace %r are known in namespace %r; did you mean that one?",
            most.prompts, most.asked, namespace, most.namespace,
        )  # fmt: skip
    elif similar and all(shard.namespace is None for shard in found):
        logger.warning("HistoSpec: nothing is known in namespace %r; did you mean %r?", namespace, similar[0])
