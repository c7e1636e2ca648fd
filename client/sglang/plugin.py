"""The plug-in that SGLang loads in its processes (entry point sglang.srt.plugins). It wraps these functions of SGLang:

============================================ ====================================================================
ServerArgs.resolve_once                      fills in the arguments for drafts, with HISTOSPEC_ENABLE=1
Scheduler.__init__                           connects to the server, after SGLang has made the scheduler
Scheduler._add_request_to_queue              opens a session
Scheduler.get_next_batch_to_run              announces new sessions
Scheduler.send_abort_output                  closes the session of a request that is aborted in the queue
Scheduler.record_weight_version_change       notes new weights
Scheduler.release_host_resources             sends the last responses
SchedulerOutputStreamer.stream_output        sends new tokens and finished responses before SGLang sends its outputs
NGRAMWorker._prepare_draft_tokens            puts the drafts into the places that SGLang verifies
============================================ ====================================================================

SGLang before 0.5.23 has others in place of three of them: `ServerArgs.__post_init__` resolves the arguments,
`SenderWrapper.send_output` reports aborted requests, and `SchedulerWeightUpdaterManager.update_weights_from_*` loads
new weights. The last also asks NGRAMWorker to load them, which in 0.5.15 raises AttributeError for files and IPC, and
ends the engine; the plug-in gives NGRAMWorker what it lacks.

SGLang's own registry does the wrapping (`HookRegistry`). SGLang logs an exception of a plug-in and goes on; the
functions below raise only where the engine must not start.
"""

import importlib
import logging
import pkgutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

from histospec.client.engines import environment
from histospec.client.sglang import places, settings
from histospec.client.sglang.adapter import SchedulerDrafts
from histospec.client.sglang.interface import NgramWorker, Req, ScheduleBatch
from histospec.client.sglang.ranks import Ranks

logger = logging.getLogger("histospec.sglang")

ARGUMENTS = "sglang.srt.server_args.ServerArgs"
MODULE = "sglang.srt.managers.scheduler"
SCHEDULER = f"{MODULE}.Scheduler"
COMPONENTS = "sglang.srt.managers.scheduler_components"
STREAMER = f"{COMPONENTS}.output_streamer.SchedulerOutputStreamer"
SENDER = f"{COMPONENTS}.output_sender.SenderWrapper"
UPDATER = f"{COMPONENTS}.weight_updater.SchedulerWeightUpdaterManager"
SOURCES = ("disk", "distributed", "tensor", "ipc")
WORKER = "sglang.srt.speculative.ngram_worker.NGRAMWorker"

# Of this process, which has at most one scheduler.
_current: SchedulerDrafts | None = None  # in the first rank of an engine
_ranks: Ranks | None = None


def register() -> None:
    """Wraps what this process needs, if the user has asked for drafts.

    A scheduler's process has loaded its module when it loads plug-ins. If a function is missing, none is wrapped.
    """
    if not settings.wanted():
        return
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    kind = registry.HookType
    hooks: list[tuple[str, Any, Any]] = []
    if environment.enabled():
        resolves = _first(f"{ARGUMENTS}.resolve_once", f"{ARGUMENTS}.__post_init__")
        hooks.append((resolves, settings.fill_in, kind.BEFORE))
    if MODULE in sys.modules:
        hooks += [
            (f"{SCHEDULER}.__init__", _made, kind.AFTER),
            (f"{SCHEDULER}._add_request_to_queue", _queued, kind.AFTER),
            (f"{SCHEDULER}.get_next_batch_to_run", _choosing, kind.BEFORE),
            (_first(f"{SCHEDULER}.send_abort_output", f"{SENDER}.send_output"), _sent, kind.AFTER),
            (f"{SCHEDULER}.release_host_resources", _leaving, kind.BEFORE),
            (f"{STREAMER}.stream_output", _processed, kind.BEFORE),
            (f"{WORKER}._prepare_draft_tokens", _prepare, kind.AROUND),
        ]
        if _exists(version := f"{SCHEDULER}.record_weight_version_change"):
            hooks.append((version, _new_weights, kind.AFTER))
        else:
            hooks += [(f"{UPDATER}.update_weights_from_{source}", _updated, kind.AFTER) for source in SOURCES]
    if lacking := [target for target, _, _ in hooks if not _exists(target)]:
        logger.warning(
            "HistoSpec: this SGLang has no %s, so its engines start WITHOUT drafts from the server (docs/sglang.md)",
            ", ".join(lacking),
        )
        return
    for target, hook, when in hooks:
        registry.HookRegistry.register(target, hook, when)
    if any(hook is _updated for _, hook, _ in hooks):
        _accept_weights(pkgutil.resolve_name(WORKER))


def _first(target: str, older: str) -> str:
    """Returns the name that this SGLang has: that of 0.5.23 if it has both or none."""
    return older if _exists(older) and not _exists(target) else target


def _exists(target: str) -> bool:
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return False
    return True


def _accept_weights(worker: type) -> None:
    """Lets a NGRAMWorker be told of new weights. It has none of its own: the target worker has loaded them."""
    for source in SOURCES:
        if not hasattr(worker, name := f"update_weights_from_{source}"):
            setattr(worker, name, lambda self, update: (True, ""))


def _made(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    global _current, _ranks
    if settings.drafts_here(scheduler):
        _ranks = Ranks(scheduler.tp_group)
        if _ranks.leads:
            _current = SchedulerDrafts(scheduler)


def _queued(result: Any, scheduler: Any, req: Req, *args: Any, **kwargs: Any) -> None:
    if _current is not None and scheduler.waiting_queue and scheduler.waiting_queue[-1] is req:  # it was not refused
        _current.queued(req)


def _choosing(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    if _current is not None:
        _current.choosing()


def _processed(streamer: Any, reqs: Sequence[Req], *args: Any, **kwargs: Any) -> None:
    if _current is not None:
        _current.processed(reqs)


def _sent(result: Any, sender: Any, output: Any, req: Any = None, *args: Any, **kwargs: Any) -> None:
    """Hears what is sent besides the outputs of steps: 0.5.23 reports aborted requests alone, others all answers."""
    if _current is not None and req is not None and type(output).__name__ == "AbortReq":
        _current.aborted(req)


def _new_weights(result: Any, scheduler: Any, new_version: str | None, *args: Any, **kwargs: Any) -> None:
    if _current is not None:
        _current.new_weights(new_version)


def _updated(result: Any, updater: Any, update: Any, *args: Any, **kwargs: Any) -> None:
    if _current is not None and result.success:
        _current.new_weights(update.weight_version)


def _leaving(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    if _current is not None:
        _current.shut_down()


def _prepare(prepare: Callable[..., Any], worker: NgramWorker, batch: ScheduleBatch, *args: Any, **kwargs: Any) -> Any:
    tokens, mask = prepare(worker, batch, *args, **kwargs)
    if _ranks is not None:
        number, requests = worker.draft_token_num, len(batch.reqs)
        chosen = places.choose([None] * requests, number, 0) if _current is None else _current.drafts(batch)
        places.put(tokens, mask, _ranks.share(chosen), number)
    return tokens, mask
