"""Whether SGLang's arguments go with drafts of a server, and what HISTOSPEC_ENABLE=1 fills in."""

import logging
import os
from typing import Any

from histospec.client.engines import environment
from histospec.client.sglang.interface import Scheduler

logger = logging.getLogger("histospec.sglang")

ALGORITHM = "NGRAM"


def wanted() -> bool:
    """Returns whether the user asks for drafts. Raises ValueError if HISTOSPEC_ENABLE is invalid."""
    return environment.enabled() or bool(os.environ.get("HISTOSPEC_ENDPOINT"))


def fill_in(server_args: Any) -> None:
    """Sets the arguments for drafts in a ServerArgs that SGLang has not resolved yet, unless one of them is set.

    Raises:
        ConfigurationError: see `environment.may_fill_in`.
    """
    if getattr(server_args, "_resolution_finished", False) or server_args.speculative_algorithm == ALGORITHM:
        return
    if not environment.may_fill_in(_obstacle(server_args), logger):
        return
    server_args.speculative_algorithm = ALGORITHM
    server_args.speculative_num_draft_tokens = environment.draft_tokens() + 1  # and the place of the last token
    server_args.speculative_ngram_max_bfs_breadth = 1  # chains alone, which every attention backend verifies
    server_args.disable_overlap_schedule = True
    if server_args.max_running_requests is None:
        logger.warning("HistoSpec: with NGRAM SGLang runs 48 requests at once unless max_running_requests is set")
    logger.info(
        "HistoSpec: HISTOSPEC_ENABLE is 1: speculative_algorithm is %s, speculative_num_draft_tokens is %d, "
        "disable_overlap_schedule is True",
        ALGORITHM, server_args.speculative_num_draft_tokens,
    )  # fmt: skip


def _obstacle(server_args: Any) -> str | None:
    """Returns which argument does not go with drafts; None if all do."""
    if server_args.speculative_algorithm is not None:
        return f"speculative_algorithm is set and wins: {server_args.speculative_algorithm}"
    if server_args.is_embedding:
        return "is_embedding is set, and the model generates no text"
    if server_args.disaggregation_mode != "null":
        return f"disaggregation_mode is {server_args.disaggregation_mode!r}, which HistoSpec does not know"
    if server_args.enable_dp_attention:
        return "enable_dp_attention is set, which SGLang refuses with NGRAM"
    if server_args.pp_size > 1:
        return f"pp_size is {server_args.pp_size}; must be 1"
    return None


def drafts_here(scheduler: Scheduler) -> bool:
    """Returns whether a scheduler drafts with a server; logs what keeps it from that."""
    arguments, why = scheduler.server_args, None
    if not (scheduler.is_generation and scheduler.spec_algorithm.is_ngram()):
        why = f"speculative_algorithm is {arguments.speculative_algorithm}; set it to {ALGORITHM}"
    elif scheduler.enable_overlap:
        why = "SGLang overlaps schedules, so drafts come too late; set disable_overlap_schedule"
    elif arguments.nnodes > 1:
        why = f"nnodes is {arguments.nnodes}; must be 1, because other nodes might lack the plug-in"
    elif arguments.disaggregation_mode != "null":
        why = f"disaggregation_mode is {arguments.disaggregation_mode!r}; HistoSpec drafts with 'null'"
    elif min(arguments.speculative_accept_threshold_single, arguments.speculative_accept_threshold_acc) < 1:
        why = "speculative_accept_threshold_single or _acc is below 1, and the output would not be the model's own"
    if why is not None:
        logger.warning("HistoSpec: this engine starts WITHOUT drafts from the server: %s (docs/sglang.md)", why)
    return why is None
