"""The client for asyncio."""

from __future__ import annotations  # so that help() names types as they are written here

import asyncio
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, overload

from histospec.client import arguments, fork
from histospec.client.config import Breaker, Limits, Timeouts, Tls, configure
from histospec.client.core.budget import Budget, Report
from histospec.client.core.core import Core
from histospec.client.core.shard import Pending
from histospec.client.transport import calls, greeting
from histospec.client.transport.lifetime import LoopConnections
from histospec.client.transport.many import carry_out_async
from histospec.client.transport.single import LoopCalls
from histospec.client.transport.stream import Streams
from histospec.client.values import Draft, Inspection, LengthPrediction, Response, Shard, Stats, Tokens
from histospec.protocol.costs import DEFAULT_VERIFY_COST

GRACE = 0.001
"""How many seconds a receive past its deadline waits for drafts that have already arrived."""


class AsyncDraftClient:
    """A client of the draft server for asyncio. It has the methods of `DraftClient`, as coroutines.

    All calls must come from one event loop. Arguments, environment and errors are those of `DraftClient`.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        namespace: str | None = None,
        *,
        token: str | None = None,
        tls: Tls | bool | None = None,
        deadline: float | None = None,
        timeouts: Timeouts | None = None,
        breaker: Breaker | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.config = configure(endpoint, namespace, token, tls, deadline, timeouts, breaker, limits)
        self._waiting = _Waiting()
        self._core = Core(self.config, self._waiting.look_again)
        self._streams = Streams(self._core)
        self._connections = LoopConnections(self._core, self._streams)
        self._calls = LoopCalls(self._core, self._streams, self._connections, self._waiting.until)
        self._dropped = weakref.finalize(self, self._connections.dropped)
        self._dropped.atexit = False  # type: ignore[misc]  # missing in the stubs

    async def open(
        self,
        prompts: Sequence[Tokens],
        problems: Sequence[str | None] | None = None,
        generated: Sequence[Tokens] | None = None,
        seeds: Sequence[int | None] | None = None,
    ) -> list[int]:
        """See `DraftClient.open`."""
        return self._core.begin_sessions(prompts, problems, generated, seeds)

    async def step(
        self,
        sessions: Sequence[int],
        new_tokens: Sequence[Tokens],
        max_tokens: int = 16,
        verify_cost: float = DEFAULT_VERIFY_COST,
        *,
        verified: Sequence[int] | None = None,
        model_drafted: Sequence[int] | None = None,
        model_accepted: Sequence[int] | None = None,
    ) -> list[Draft]:
        """See `DraftClient.step`."""
        pending = await self.send(
            sessions, new_tokens, max_tokens, verify_cost,
            verified=verified, model_drafted=model_drafted, model_accepted=model_accepted,
        )  # fmt: skip
        return await self.receive(pending)

    async def send(
        self,
        sessions: Sequence[int],
        new_tokens: Sequence[Tokens],
        max_tokens: int = 16,
        verify_cost: float = DEFAULT_VERIFY_COST,
        *,
        verified: Sequence[int] | None = None,
        model_drafted: Sequence[int] | None = None,
        model_accepted: Sequence[int] | None = None,
    ) -> Pending:
        """See `DraftClient.send`."""
        budget = Budget(max_tokens, verify_cost)
        report = Report(verified, model_drafted, model_accepted)
        pending = self._core.advance_sessions(sessions, new_tokens, budget, time.monotonic(), report)
        if pending.touched:
            self._streams.kick(pending.touched)
            await asyncio.sleep(0)
        return pending

    async def receive(self, pending: Pending) -> list[Draft]:
        """See `DraftClient.receive`."""
        fork.refuse()
        arguments.instance("pending", pending, Pending, "give what send returned, awaited")
        try:
            await self._waiting.until(lambda: pending.done, max(GRACE, pending.deadline - time.monotonic()))
        except asyncio.CancelledError:
            self._core.abandon(pending)
            raise
        return self._core.collect(pending, time.monotonic())

    async def finish(
        self,
        sessions: Sequence[int],
        commit: bool = True,
        epochs: int | Sequence[int | None] | None = None,
        rewards: float | Sequence[float | None] | None = None,
        logprobs: Sequence[Any] | None = None,
        changes: int | Sequence[int] | None = None,
        alternatives: Sequence[bytes | None] | None = None,
    ) -> None:
        """See `DraftClient.finish`."""
        self._core.end_sessions(sessions, commit, epochs, rewards, logprobs, changes, alternatives)

    async def flush(self, timeout: float | None = None) -> None:
        """See `DraftClient.flush`."""
        until = time.monotonic() + self._core.patience(timeout)
        while touched := self._core.flush(time.monotonic()):
            self._streams.kick(touched)
            await asyncio.sleep(0)
            await self._waiting.until(partial(self._core.settled, touched), until - time.monotonic())
            if time.monotonic() >= until:
                self._core.overdue(touched, time.monotonic())
                return

    async def ingest(
        self,
        prompt: Tokens,
        responses: Sequence[Response],
        epoch: int | None = None,
        problem: str | None = None,
        seeds: Sequence[int | None] | None = None,
    ) -> None:
        """See `DraftClient.ingest`."""
        await self._calls.do(calls.ingest, prompt, responses, epoch, problem, seeds)

    async def history(self, prompt: Tokens, problem: str | None = None, limit: int | None = None) -> list[Response]:
        """See `DraftClient.history`."""
        await self.flush(self.config.timeouts.shutdown)
        return (await self._calls.do(calls.history, prompt, problem, limit))[0]

    async def histories(
        self, prompts: Sequence[Tokens], problems: Sequence[str | None] | None = None, limit: int | None = None
    ) -> list[list[Response] | None]:
        """See `DraftClient.histories`."""
        await self.flush(self.config.timeouts.shutdown)
        await self._calls.find()
        plan = calls.histories(self._core, prompts, problems, limit)
        return [None if answer is None else answer[0] for answer in await carry_out_async(plan, self._calls.one)]

    async def ingest_many(
        self,
        prompts: Sequence[Tokens],
        responses: Sequence[Sequence[Response]],
        epoch: int | None = None,
        problems: Sequence[str | None] | None = None,
        seeds: Sequence[Sequence[int | None] | None] | None = None,
    ) -> list[bool]:
        """See `DraftClient.ingest_many`."""
        await self._calls.find()
        plan = calls.ingest_many(self._core, prompts, responses, epoch, problems, seeds)
        return [answer is not None for answer in await carry_out_async(plan, self._calls.one)]

    async def predict_length(
        self,
        prompt: Tokens,
        problem: str | None = None,
        generated: int = 0,
        quantiles: Sequence[float] | None = None,
    ) -> LengthPrediction:
        """See `DraftClient.predict_length`."""
        return (await self._calls.do(calls.predict_length, prompt, problem, generated, quantiles))[0]

    async def predict_lengths(
        self,
        prompts: Sequence[Tokens],
        problems: Sequence[str | None] | None = None,
        generated: Sequence[int] | None = None,
        quantiles: Sequence[float] | None = None,
    ) -> list[LengthPrediction | None]:
        """See `DraftClient.predict_lengths`."""
        await self._calls.find()
        asked = calls.predict_lengths(self._core, prompts, problems, generated, quantiles)
        return asked.in_order(await carry_out_async(asked.calls, self._calls.one))

    async def topology(self) -> list[Shard]:
        """See `DraftClient.topology`."""
        await self._calls.find()
        return calls.members(self._core) or (await self._calls.do(calls.topology))[0]

    async def inspect(self, timeout: float | None = None) -> list[Inspection]:
        """See `DraftClient.inspect`."""
        return await self._calls.do(calls.inspect, timeout)

    async def greet(self, timeout: float) -> list[Inspection]:
        """See `DraftClient.greet`."""
        await self._calls.find(timeout)
        return await greeting.greet_async(self._core, self._calls.one, timeout)

    async def drop_namespace(self) -> int:
        """See `DraftClient.drop_namespace`."""
        return sum(await self._calls.do(calls.drop_namespace))

    async def rewind(self, epoch: int) -> int:
        """See `DraftClient.rewind`."""
        return sum(await self._calls.do(calls.rewind, epoch))

    def stats(self) -> Stats:
        """See `DraftClient.stats`."""
        return self._core.stats()

    async def shutdown(self) -> None:
        """See `DraftClient.shutdown`."""
        if fork.forked():
            return
        self._dropped.detach()
        await self.flush(self.config.timeouts.shutdown)
        self._core.report_losses()
        await self._connections.end()

    @overload
    async def close(self) -> None: ...
    @overload
    async def close(
        self,
        sessions: Sequence[int],
        commit: bool = True,
        epochs: int | Sequence[int | None] | None = None,
        rewards: float | Sequence[float | None] | None = None,
        logprobs: Sequence[Any] | None = None,
        changes: int | Sequence[int] | None = None,
        alternatives: Sequence[bytes | None] | None = None,
    ) -> None: ...
    async def close(self, *args: Any, **kwargs: Any) -> None:
        """See `DraftClient.close`."""
        await (self.finish(*args, **kwargs) if args or kwargs else self.shutdown())

    async def aclose(self) -> None:
        """Calls `shutdown`, for `contextlib.aclosing`."""
        await self.shutdown()

    def __repr__(self) -> str:
        return f"<AsyncDraftClient {self._core.summary()}>"

    async def __aenter__(self) -> AsyncDraftClient:
        fork.refuse()
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("an AsyncDraftClient holds connections and cannot be copied or pickled; make a new one instead")

    async def __aexit__(self, *exc: object) -> None:
        await self.shutdown()


class _Waiting:
    """The waiting calls. It does not refer to the client, so that streams do not keep the client alive."""

    def __init__(self) -> None:
        self._calls: set[tuple[Callable[[], bool], asyncio.Future[None]]] = set()

    async def until(self, done: Callable[[], bool], timeout: float) -> None:
        if done() or timeout <= 0:
            return
        call = (done, asyncio.get_running_loop().create_future())
        self._calls.add(call)
        try:
            await asyncio.wait([call[1]], timeout=timeout)
        finally:
            self._calls.discard(call)

    def look_again(self) -> None:
        for done, future in self._calls:
            if done() and not future.done():
                future.set_result(None)
