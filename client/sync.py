"""The blocking client, for worker threads."""

from __future__ import annotations  # so that help() names types as they are written here

import time
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn, overload

from histospec.client import arguments, fork
from histospec.client.aio import GRACE
from histospec.client.config import Breaker, Limits, Timeouts, Tls, configure
from histospec.client.core.budget import Budget, Report
from histospec.client.core.core import Core
from histospec.client.core.shard import Pending
from histospec.client.transport import calls, greeting
from histospec.client.transport.lifetime import PumpedConnections
from histospec.client.transport.many import carry_out
from histospec.client.transport.pump import Pump
from histospec.client.transport.single import BlockingCalls
from histospec.client.transport.stream import Streams
from histospec.client.values import Draft, Inspection, LengthPrediction, Response, Shard, Stats, Tokens
from histospec.protocol.costs import DEFAULT_VERIFY_COST


class DraftClient:
    """A client of the draft server. Thread-safe; connects when it is first needed.

    ::

        with DraftClient("host:6378", namespace="run-1") as client:      # or client.shutdown() at the end
            client.ingest([1, 2, 3], [Response([4, 5, 6, 7])], epoch=0)  # what the policy wrote before
            sessions = client.open([[1, 2, 3]])                          # generations that begin
            drafts = client.step(sessions, [[4, 5]])                     # what each generated -> what may come next
            client.finish(sessions, commit=True, epochs=1)               # they join the history

    `close()` is `shutdown()`, as with files and sockets; `close(sessions)` is `finish`, which was called so before.

    A worker that steps is never held up longer than the deadline, and never sees an error of the server or the
    network: drafts are then empty. Sessions survive a restart of the server, because the client keeps their tokens and
    opens them again. A finished response that the server has not acknowledged is sent again after a reconnection, so it
    is stored **at least once**: if the connection broke between the server's storing and its acknowledging, twice.

    A client does not cross `fork`: in a process forked from one that had connected every method raises Unavailable,
    also of a client made there, and `shutdown` does nothing. Fork before, or spawn. Where a process imports gRPC before
    this package and forks later, start it with GRPC_ENABLE_FORK_SUPPORT=0: otherwise gRPC starts threads again in the
    child, which sometimes crashes it.

    A client that is dropped without `shutdown` closes its connections; responses that were not acknowledged are lost.

    Args:
        endpoint: addresses of the shards, "host:6378,host2:6378", or with stable names, "a=host:6378,b=host2:6378"; or
            "discover://name:6378", to find all shards behind that name, or known to those, and follow their changes.
            Default: HISTOSPEC_ENDPOINT.
        namespace: the training run; histories of two namespaces never mix. Default: HISTOSPEC_NAMESPACE.
        token: bearer token. Default: HISTOSPEC_TOKEN.
        tls: True for the system's authorities, or files. Default: HISTOSPEC_TLS_CA, _CERT, _KEY; none means plain TCP.
        deadline: seconds that a step may take. Default: HISTOSPEC_DEADLINE, or 0.02.
        timeouts, breaker, limits: everything else that can be tuned, see `histospec.client.config`.

    Raises:
        ConfigurationError: something is missing or malformed.
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
        self._pump = Pump()
        self._core = Core(self.config, self._pump.wake)
        self._streams = Streams(self._core)
        self._connections = PumpedConnections(self._core, self._streams, pump=self._pump)
        self._calls = BlockingCalls(self._core, self._streams, self._connections)
        self._dropped = weakref.finalize(self, self._connections.dropped)
        self._dropped.atexit = False  # type: ignore[misc]  # the process takes its connections along

    # ---- drafting: never raises for a fault of the server ---------------------------------------------------------

    def open(
        self,
        prompts: Sequence[Tokens],
        problems: Sequence[str | None] | None = None,
        generated: Sequence[Tokens] | None = None,
        seeds: Sequence[int | None] | None = None,
    ) -> list[int]:
        """Opens a session for each prompt. Local and instant: the server hears of it with the next message.

        Args:
            prompts: B prompts, each the tokens of the context that the generation starts from; not empty.
            problems: None, or B explicit problem ids (multi-turn RL), None where the prompt itself is the problem.
            generated: None, or B times what was generated already, for a generation that goes on after a prefix.
            seeds: None, or B times the sampling seed (int64) that the generation is drawn with, None where nobody knows
                it. With coupled sampling, the latest response of the problem with the same seed is the best source of
                drafts.

        Returns:
            B session ids: integers that this client never uses twice. They mean nothing to another client.

        Raises:
            ValueError: an argument is malformed; no session was opened.
        """
        return self._core.begin_sessions(prompts, problems, generated, seeds)

    def step(
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
        """Tells what each session has generated, and gets a draft for each, within the deadline.

        Args:
            sessions: B session ids, each at most once.
            new_tokens: B times what the session generated since its last step.
            max_tokens: longest draft wanted, at most 256; 0 only tells.
            verify_cost: marginal cost of verifying one drafted token, in units of a plain decoding step.
            verified: for a worker with a drafter of its own, whose tokens it verifies in some steps: B times how many
                tokens of the session's last draft, from its first on, were verified with `new_tokens`, at most 1,024.
                None: the worker verifies every draft in full.
            model_drafted, model_accepted: B times how many tokens of the worker's own drafter were verified since the
                session's last step, and how many of these were accepted. Both or none, and only with `verified`.

        Returns:
            B drafts; empty where the server had nothing, was late or is away.

        Raises:
            ValueError: an argument is malformed; nothing was changed.
            UnknownSession: a session is not open; nothing was changed.
        """
        pending = self.send(
            sessions, new_tokens, max_tokens, verify_cost,
            verified=verified, model_drafted=model_drafted, model_accepted=model_accepted,
        )  # fmt: skip
        return self.receive(pending)

    def send(
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
        """The first half of `step`: writes the message from this thread, and does not wait for the answer.

        The deadline runs from here.
        """
        budget = Budget(max_tokens, verify_cost)
        report = Report(verified, model_drafted, model_accepted)
        pending = self._core.advance_sessions(sessions, new_tokens, budget, time.monotonic(), report)
        if pending.touched:
            # A function that waits for its turn on the loop must not hold the client.
            self._pump.run(partial(self._streams.kick, pending.touched), self.config.timeouts.step)
        return pending

    def receive(self, pending: Pending) -> list[Draft]:
        """The second half of `step`: waits for what is left of the deadline. Call it once for each `send`."""
        fork.refuse()
        arguments.instance("pending", pending, Pending, "give what send returned")
        if not pending.done:
            self._pump.wait(lambda: pending.done, max(GRACE, pending.deadline - time.monotonic()))
        return self._core.collect(pending, time.monotonic())

    def finish(
        self,
        sessions: Sequence[int],
        commit: bool = True,
        epochs: int | Sequence[int | None] | None = None,
        rewards: float | Sequence[float | None] | None = None,
        logprobs: Sequence[Any] | None = None,
        changes: int | Sequence[int] | None = None,
    ) -> None:
        """Ends sessions. Local and instant: the server hears of it with the next message, or `flush`.

        Args:
            sessions: B session ids.
            commit: what the sessions generated joins the history of their problems; one for all.
            epochs: version of the policy, one for all or one each; None: the newest that the namespace has seen.
            rewards: one for all or one each, None where there is none.
            logprobs: None, or B times None or float32[n], one for each generated token.
            changes: for who cannot say the epoch: how often the weights have changed under this worker, one for all or
                one each. The server counts on from the newest epoch, as long as nobody names any.

        Raises:
            ValueError, UnknownSession: an argument is wrong; nothing was closed.
        """
        self._core.end_sessions(sessions, commit, epochs, rewards, logprobs, changes)

    def flush(self, timeout: float | None = None) -> None:
        """Sends the opens and closes that wait for the next message, and waits for commits to be acknowledged.

        Best effort: returns after `timeout` seconds (default: the deadline of a step) whatever happened, at once where
        the breaker is open and no connection is being made. What was not acknowledged is kept for later.
        """
        until = time.monotonic() + self._core.patience(timeout)
        while touched := self._core.flush(time.monotonic()):
            self._pump.run(partial(self._streams.kick, touched), until - time.monotonic())
            self._pump.wait(partial(self._core.settled, touched), until - time.monotonic())
            if time.monotonic() >= until:
                self._core.overdue(touched, time.monotonic())
                return

    def stats(self) -> Stats:
        """What happened since the client was made."""
        return self._core.stats()

    # ---- single calls: these raise when the server cannot be reached ----------------------------------------------

    def ingest(
        self,
        prompt: Tokens,
        responses: Sequence[Response],
        epoch: int | None = None,
        problem: str | None = None,
        seeds: Sequence[int | None] | None = None,
    ) -> None:
        """Adds finished responses to the history of a problem. Returns when the store has them.

        Many responses travel in several messages; after an error some of them may have been stored.

        Args:
            prompt: tokens of the problem's prompt.
            responses: what the policy generated for it; their `epoch` is not looked at.
            epoch: version of the policy that did; None: the newest that the namespace has seen.
            problem: explicit problem id; None: the prompt is the problem.
            seeds: the sampling seed of each response (int64 or None), in place of their own `seed`.

        Raises:
            ValueError: an argument is malformed; nothing was sent.
            HistoSpecError: see `histospec.client.errors`.
        """
        self._calls.do(calls.ingest, prompt, responses, epoch, problem, seeds)

    def history(self, prompt: Tokens, problem: str | None = None, limit: int | None = None) -> list[Response]:
        """The stored responses of a problem, oldest first; at most the `limit` newest. None are stored: an empty list.

        What this client has committed before is sent first, so it is normally there.
        """
        self.flush(self.config.timeouts.shutdown)
        return self._calls.do(calls.history, prompt, problem, limit)[0]

    def histories(
        self, prompts: Sequence[Tokens], problems: Sequence[str | None] | None = None, limit: int | None = None
    ) -> list[list[Response] | None]:
        """`history` of many problems, several at a time.

        Args:
            prompts, limit: as for `history`, one prompt for each problem.
            problems: None, or an explicit problem id, or None, for each prompt.

        Returns:
            The responses of each problem; None where its shard cannot be reached. Such a shard is asked no more.

        Raises:
            ValueError: an argument is malformed; nothing was asked.
            HistoSpecError: as for `history`, but not Unavailable.
        """
        self.flush(self.config.timeouts.shutdown)
        self._calls.find()
        plan = calls.histories(self._core, prompts, problems, limit)
        return [None if answer is None else answer[0] for answer in carry_out(plan, self._calls.one)]

    def ingest_many(
        self,
        prompts: Sequence[Tokens],
        responses: Sequence[Sequence[Response]],
        epoch: int | None = None,
        problems: Sequence[str | None] | None = None,
        seeds: Sequence[Sequence[int | None] | None] | None = None,
    ) -> list[bool]:
        """`ingest` for many problems, several at a time.

        Args:
            prompts, responses, problems, seeds: for each problem what `ingest` takes.
            epoch: as for `ingest`, the same for all.

        Returns:
            Whether the responses of each problem are stored; False where its shard cannot be reached, which is then
            asked no more.

        Raises:
            ValueError: an argument is malformed; nothing was sent.
            HistoSpecError: as for `ingest`, but not Unavailable.
        """
        self._calls.find()
        plan = calls.ingest_many(self._core, prompts, responses, epoch, problems, seeds)
        return [answer is not None for answer in carry_out(plan, self._calls.one)]

    def predict_length(
        self,
        prompt: Tokens,
        problem: str | None = None,
        generated: int = 0,
        quantiles: Sequence[float] | None = None,
    ) -> LengthPrediction:
        """Quantiles of the whole length of a response, given that it is longer than `generated` tokens.

        Args:
            prompt, problem: as for `ingest`.
            generated: tokens generated so far.
            quantiles: each in [0, 1]; None: 0.1, 0.5, 0.9, 0.99.
        """
        return self._calls.do(calls.predict_length, prompt, problem, generated, quantiles)[0]

    def topology(self) -> list[Shard]:
        """The shards of the service: those that were found, or as the first endpoint knows them."""
        self._calls.find()
        return calls.members(self._core) or self._calls.do(calls.topology)[0]

    def inspect(self, timeout: float | None = None) -> list[Inspection]:
        """What every shard says of itself and of the namespace; see `histospec doctor`, which explains it.

        Args:
            timeout: seconds for each shard; None: `Timeouts.call`.

        Raises:
            HistoSpecError: see `histospec.client.errors`.
        """
        return self._calls.do(calls.inspect, timeout)

    def greet(self, timeout: float) -> list[Inspection]:
        """`inspect` for a worker that starts: what those shards say that answer; the log says why others do not."""
        self._calls.find(timeout)
        return greeting.greet(self._core, self._calls.one, timeout)

    def drop_namespace(self) -> int:
        """Forgets everything that the namespace holds, on every shard. -> responses forgotten."""
        return sum(self._calls.do(calls.drop_namespace))

    def rewind(self, epoch: int) -> int:
        """Forgets every response of an epoch newer than this one, on every shard: for a trainer that goes back to a
        checkpoint, before it samples again. -> responses forgotten.
        """
        return sum(self._calls.do(calls.rewind, epoch))

    # ---- the end --------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Sends what waits, for at most `Timeouts.shutdown` seconds, and closes the connections.

        Afterwards steps give empty drafts, and the calls that ask the server raise Unavailable.
        """
        if fork.forked():  # what there is belongs to the parent
            return
        if not self._calls.end():
            return
        self._dropped.detach()
        self.flush(self.config.timeouts.shutdown)
        self._core.report_losses()
        self._connections.end()

    @overload
    def close(self) -> None: ...
    @overload
    def close(
        self,
        sessions: Sequence[int],
        commit: bool = True,
        epochs: int | Sequence[int | None] | None = None,
        rewards: float | Sequence[float | None] | None = None,
        logprobs: Sequence[Any] | None = None,
        changes: int | Sequence[int] | None = None,
    ) -> None: ...
    def close(self, *args: Any, **kwargs: Any) -> None:
        """`close()` is `shutdown()`; `close(sessions, ...)` is `finish`, with the same arguments."""
        if args or kwargs:
            self.finish(*args, **kwargs)
        else:
            self.shutdown()

    def __repr__(self) -> str:
        return f"<DraftClient {self._core.summary()}>"

    def __enter__(self) -> DraftClient:
        fork.refuse()
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a DraftClient holds connections and cannot be copied or pickled; make another one")

    def __exit__(self, *exc: object) -> None:
        self.shutdown()
