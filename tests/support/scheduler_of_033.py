"""HistoSpec's scheduler with what vLLM 0.33 changed at the end of a step, over the scheduler of an older vLLM.

There is no CPU build of vLLM 0.33. Its sources differ from 0.32 in three places that a step passes between the sampled
tokens and the end of a request:

- `_update_request_with_output` takes the tokens that it trims after a stop off `num_computed_tokens`;
- `update_from_output` then caches the blocks of the accepted tokens, from that count;
- it puts streaming requests that go on into the queue at the end; the adapter gives those no sessions.

`AsIn033` does the first two in our words. `WithTheFunctionOf033` runs vLLM's own function, if `make vllm-versions` has
kept its source.
"""

import ast
import importlib
from typing import Any

from histospec.client.vllm import HistoSpecScheduler
from histospec.client.vllm.interface import Request, RequestStatus
from scripts.vllm_sources import Sources
from scripts.vllm_versions import KEPT

SOURCES = KEPT / "vllm-0.33.0.zip"
MODULE, NAME = "vllm.v1.core.sched.scheduler", "_update_request_with_output"


class AsIn033(HistoSpecScheduler):
    """Counts the sampled tokens that it cuts off."""

    cut = 0

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        scheduler: Any = self
        changing: Any = request
        running = request.status == getattr(RequestStatus, "RUNNING")  # noqa: B009 - the adapter itself needs no such name
        sampled = len(new_token_ids)
        kept, stopped = self._trim(request, new_token_ids, is_stale)
        self.cut += sampled - len(kept)
        if running and not is_stale and scheduler.num_spec_tokens > 0:
            scheduler.kv_cache_manager.cache_blocks(
                request, changing.num_computed_tokens - changing.num_in_flight_tokens
            )
        return kept, stopped

    def _trim(self, request: Any, new_token_ids: list[int], is_stale: bool) -> tuple[list[int], bool]:
        sampled = len(new_token_ids)
        older: Any = super()
        kept, stopped = older._update_request_with_output(request, new_token_ids, is_stale)
        if stopped and not is_stale:
            request.num_computed_tokens -= sampled - len(kept)
        return kept, stopped


class WithTheFunctionOf033(AsIn033):
    """Runs the function of vLLM 0.33 in the place of the installed one."""

    def _trim(self, request: Any, new_token_ids: list[int], is_stale: bool) -> tuple[list[int], bool]:
        kept, stopped = _function()(self, request, new_token_ids, is_stale)
        return list(kept), bool(stopped)


def _function() -> Any:
    if NAME not in _compiled:
        tree = Sources(SOURCES).module(MODULE)
        assert tree is not None
        (function,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == NAME)
        space = dict(vars(importlib.import_module(MODULE)))
        exec(compile(ast.Module([function], []), str(SOURCES), "exec"), space)
        _compiled[NAME] = space[NAME]
    return _compiled[NAME]


_compiled: dict[str, Any] = {}
