"""Threads for work that is too long for the event loop: some for each kind of work.

asyncio's own threads serve all kinds in the order of arrival. A flood of one kind would delay all others there.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, ParamSpec, TypeVar

Kind = Literal["history", "export", "import", "ingest", "predict", "draft"]
"""Answers to `History`, pieces of exports, imports, ingests of many responses, predictions; messages of many parts and
long opens of Draft streams."""
THREADS: dict[Kind, int] = {"history": 4, "export": 2, "import": 1, "ingest": 1, "predict": 1, "draft": 2}
"""Two histories at a time may be large (`rpc/answering`): the other threads are for short ones."""

Args = ParamSpec("Args")
Result = TypeVar("Result")


class Threads:
    """The threads of one server, started when they are first needed."""

    def __init__(self) -> None:
        self._pools = {kind: ThreadPoolExecutor(most, thread_name_prefix=kind) for kind, most in THREADS.items()}

    async def run(self, kind: Kind, work: Callable[Args, Result], *args: Args.args, **named: Args.kwargs) -> Result:
        """Returns the result of `work`, done in a thread of this kind."""
        return await asyncio.get_running_loop().run_in_executor(self._pools[kind], lambda: work(*args, **named))

    def close(self) -> None:
        """Ends each thread after its work."""
        for pool in self._pools.values():
            pool.shutdown(wait=False)
