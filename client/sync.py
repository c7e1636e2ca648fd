"""The blocking client, for worker threads."""

from __future__ import annotations  # so that help() names types as they are written here

import time
import weakref
from functools import partial
from typing import Any, NoReturn

from histospec.client import arguments, quiet_grpc
from histospec.client.config import Breaker, Limits, Timeouts, Tls, configure
from histospec.client.core.core import Core
from histospec.client.core.step import Pending
from histospec.client.signatures import same_as
from histospec.client.transport import calls, keeping, rehearsal
from histospec.client.transport.blocking import BlockingConnections, run
from histospec.client.transport.pump import Pump
from histospec.client.transport.stream import Streams
from histospec.client.values import Draft, Inspection, LengthPrediction, Response, Shard, Stats, Tokens

GRACE = 0.001
"""How many seconds a receive past its deadline waits for drafts that have already arrived."""


class DraftClient:
    """A blocking client of the draft server. Thread-safe; connects at its first call.

    ::

        with DraftClient("host:6378", namespace="run-1") as client:      # or call client.shutdown() at the end
            client.ingest([1, 2, 3], [Response([4, 5, 6, 7])], epoch=0)  # add an earlier response
            sessions = client.open([[1, 2, 3]])                          # open a session per prompt
            drafts = client.step(sessions, [[4, 5]])                     # report new tokens, get drafts
            client.finish(sessions, commit=True, epochs=1)               # add the responses to the history

    `close()` is `shutdown()`, as with files and sockets. `close(sessions)` is `finish`.

    A step never waits longer than the deadline, and never raises an error of the server or the network; its drafts are
    then empty. Sessions survive a restart of the server, because the client keeps their tokens and opens them again.
    The client keeps a finished response until the server acknowledges it, and sends it again after a reconnection. The
    server therefore stores it **at least once**: twice, if the connection broke between storing and acknowledging.

    A client does not work across `fork`. In a process forked from one that had connected, every method of every client
    raises Unavailable, and `shutdown` does nothing. Fork before the first connection, or use spawn. If a process
    imports gRPC before this package and forks later, start it with GRPC_ENABLE_FORK_SUPPORT=0: otherwise gRPC starts
    threads again in the child, which sometimes crashes it.

    A client that is garbage-collected, or whose process ends, without `shutdown` sends its finished responses, for at
    most `Timeouts.shutdown` seconds, and logs how many the server has not acknowledged. A process that a signal such as
    SIGTERM or SIGKILL ends, or `os._exit`, runs nothing of this: there call `flush` after `finish`.

    KeyboardInterrupt (Ctrl-C, or Jupyter's "interrupt the kernel") may end any method. The client then remains usable:
    `open`, `send`, `step` and `finish` have taken effect as a whole or not at all, and the next call connects again if
    the interrupt ended work on a connection. After an interrupted `shutdown`, call it again.

    Args:
        endpoint: addresses of the shards, "host:6378,host2:6378", or with stable names, "a=host:6378,b=host2:6378"; or
            "discover://name:6378", to find the shards behind this name and those that they know, and to follow their
            changes. Default: HISTOSPEC_ENDPOINT.
        namespace: the training run; the histories of two namespaces never mix. Default: HISTOSPEC_NAMESPACE.
        token: bearer token. Default: HISTOSPEC_TOKEN.
        tls: True for the system's authorities, or a `Tls` with files. Default: HISTOSPEC_TLS_CA, HISTOSPEC_TLS_CERT and
            HISTOSPEC_TLS_KEY; plain TCP if none is set.
        deadline: deadline of a step, in seconds. Default: HISTOSPEC_DEADLINE, or 0.02.
        timeouts: all other timeouts.
        breaker: when to stop asking a shard that does not answer, and when to try again.
        limits: how much the client keeps and sends.

    Raises:
        ConfigurationError: a setting is missing or malformed.
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
        self.config = configure(
            endpoint, namespace,
            token=token, tls=tls, deadline=deadline, timeouts=timeouts, breaker=breaker, limits=limits,
        )  # fmt: skip
        self._pump = Pump()
        self._core = Core(self.config, self._pump.wake)
        self._streams = Streams(self._core)
        self._pump.give_up = self._streams.give_up_loop
        self._connections = BlockingConnections(self._core, self._streams, self._pump)
        self._rehearsals = rehearsal.of(self._core, self._streams, self._pump)
        weakref.finalize(self, self._rehearsals.end)
        self._dropped = weakref.finalize(self, self._connections.dropped)
        self._dropped.atexit = False  # type: ignore[misc]  # the end of the process closes the connections

    # ---- drafting: never raises an error of the server ------------------------------------------------------------

    @same_as(Core.open)
    def open(self, *args: Any, **kwargs: Any) -> list[int]:
        """Opens a session for each prompt. Returns at once; the next message tells the server.

        Args:
            prompts: B prompts, each the tokens from which the generation starts; not empty.
            problems: None, or B explicit problem ids (for multi-turn RL), None for a prompt that identifies its
                problem.
            generated: None, or for each session the tokens generated before, if it continues a generation.
            seeds: None, or B sampling seeds (int64) that the generations are drawn with, None where unknown. With
                coupled sampling, the latest response of the problem with the same seed is the best source of drafts.
            position_noise: whether vLLM's model runner V2 draws with these seeds: then the noise of a token is a
                function of its position.

        Returns:
            B session ids: integers that this client never uses twice. They are not valid for other clients.

        Raises:
            ValueError: an argument is malformed; no session was opened.
        """
        sessions = self._core.prepare(*args, **kwargs)
        numbers = [session.number for session in sessions]
        try:
            self._core.begin(sessions)
            return numbers
        except BaseException:  # an interrupt: the caller will not learn the numbers
            self._core.take_back(sessions)
            raise

    @same_as(Core.continues)
    def continues(self, *args: Any, **kwargs: Any) -> bool:
        """Returns whether `prompt` continues a response, of a problem without an explicit id, that this client aborted.

        Raises ValueError if it is malformed.
        """
        return self._core.continues(*args, **kwargs)

    @same_as(Core.send)
    def step(self, *args: Any, **kwargs: Any) -> list[Draft]:
        """Reports the new tokens of each session, and returns a draft for each within the deadline.

        Args:
            sessions: B session ids, each at most once.
            new_tokens: for each session the tokens that it generated since its last step.
            max_tokens: longest draft, at most 256; 0 reports tokens without asking for drafts.
            verify_cost: marginal cost of verifying one drafted token, in units of a plain decoding step.
            verified: for a worker that also has a drafter of its own: for each session, how many tokens of its last
                draft, from the first on, the worker verified together with `new_tokens`; at most 1,024. None: the
                worker verifies every draft in full.
            model_drafted: for each session, how many tokens of the worker's own drafter the worker verified since the
                session's last step. Needs `verified` and `model_accepted`.
            model_accepted: for each session, how many of these it accepted. Needs `verified` and `model_drafted`.
            runners_up: whether drafts have their `runners_up`.

        Returns:
            B drafts. A draft is empty if the server has none, is late, or cannot be reached.

        Raises:
            ValueError: an argument is malformed; nothing was changed.
            UnknownSession: a session is not open; nothing was changed.
        """
        return self.receive(self.send(*args, **kwargs))

    @same_as(Core.send)
    def send(self, *args: Any, **kwargs: Any) -> Pending:
        """Sends a step and returns without waiting for the drafts. The deadline of the step starts here.

        The arguments are those of `step`.

        Returns:
            The pending step, for `receive`.

        Raises:
            ValueError: an argument is malformed; nothing was changed.
            UnknownSession: a session is not open; nothing was changed.
        """
        self._rehearsals.stepped()
        pending = self._core.send(*args, **kwargs)
        if pending.touched:
            # Without a reference to the client, which a function that waits on the loop would keep alive.
            kick = partial(self._streams.kick, pending.touched)
            self._pump.run(kick, self.config.timeouts.step, take=not pending.parts)  # else `wait` does
        return pending

    def receive(self, pending: Pending) -> list[Draft]:
        """Waits for the drafts of a step that `send` began, at most until its deadline. Call it once for each `send`.

        Args:
            pending: what `send` returned.

        Returns:
            As `step`.
        """
        self.wait(pending)
        return pending.drafts()

    def wait(self, pending: Pending) -> None:
        """Waits as `receive` does, for a caller that reads the drafts itself: `pending.drafts()`, `pending.tokens()`.

        Args:
            pending: what `send` returned.
        """
        quiet_grpc.refuse_after_fork()
        arguments.instance("pending", pending, Pending, "give what send returned")
        if not pending.done:
            self._pump.wait(lambda: pending.done, max(GRACE, pending.deadline - time.monotonic()))
        self._core.end_wait(pending)
        self._rehearsals.answered()

    @same_as(Core.finish)
    def finish(self, *args: Any, **kwargs: Any) -> None:
        """Ends sessions. Returns at once; the next message, or `flush`, tells the server.

        Args:
            sessions: B session ids.
            commit: whether the generated tokens of all sessions join the history of their problems.
            epochs: version of the policy, one for all sessions or one for each; None: the newest of the namespace.
            rewards: one for all sessions or one for each, None where there is none.
            logprobs: None, or for each session None or float32[n], one for each generated token. Not stored for a
                session that continues an aborted response, because those of its first tokens are unknown.
            changes: for a worker that does not know the epoch: how often its weights have changed, one for all sessions
                or one for each. The server adds it to the newest epoch, unless a client gives explicit epochs.
            alternatives: None, or for each session None or the most probable other tokens at its generated tokens, as
                `histospec.protocol.alternatives.pack` makes them.
            aborted: whether the generations may go on, with commit=False. A session that any client opens within an
                hour, with prompt and generated tokens as its prompt, continues the response: together they are one
                response to the first prompt, which the last session commits.

        Raises:
            ValueError: an argument is malformed; no session was closed.
            UnknownSession: a session is not open; no session was closed.
        """
        self._core.finish(*args, **kwargs)

    def flush(self, timeout: float | None = None) -> None:
        """Sends waiting opens and closes, and waits until the server has acknowledged the commits and the aborts.

        It returns after the timeout in any case, and at once if the breaker is open and no connection attempt runs. The
        client keeps commits that were not acknowledged and sends them again later.

        Args:
            timeout: seconds; None: the deadline of a step.
        """
        run(self._connections.flush(self._core.flush_seconds(timeout)))

    def stats(self) -> Stats:
        """Returns the counters of this client since it was made."""
        return self._core.stats()

    # ---- for trainers: never raises an error of the server --------------------------------------------------------

    @same_as(keeping.batch)
    def keep(self, *args: Any, **kwargs: Any) -> list[bool]:
        """Adds the finished responses of a training step to the history, and never ends the training.

        It waits for the store, at most `Timeouts.keep` seconds in all, and a tenth of that in the minute after it
        waited in vain. If the server is away, hangs, refuses the responses or cannot store them, they are not in the
        history, which costs only drafts; the log says so once a minute. All responses to one prompt travel in one
        message, or in as many as their size needs.

        Args:
            prompts: B prompts. A prompt with several responses stands once for each.
            responses: B responses, their tokens or a `Response`. One without tokens is not stored.
            rewards: None, or for each response a number, or a list of numbers, whose sum counts. None, NaN and infinite
                rewards are no reward.
            logprobs: None, or for each response None or float32[n], one for each token. If one of them is None or NaN,
                the response is stored without.
            generated: None, or for each response None or bool[n], also as 0 and 1: whether the policy generated the
                token; False for those of tools and users.
            epoch: version of the policy that sampled them, one for all or one for each; None: the newest of the
                namespace.
            problems: None, or for each response an explicit problem id or None.
            seeds: None, or for each response its sampling seed (int64) or None.

        Returns:
            For each response, whether the server has stored it. False if its epoch is too old to be kept, see `ingest`.
                After a lost answer it may be stored although this is False.

        Raises:
            ValueError: an argument is malformed; nothing was sent.
        """
        return run(self._connections.keep(keeping.batch(self.config, *args, **kwargs)))

    # ---- single calls: these raise if the server cannot be reached ------------------------------------------------

    @same_as(calls.ingest)
    def ingest(self, *args: Any, **kwargs: Any) -> None:
        """Adds finished responses to the history of a problem. Returns when the server has stored them.

        Many responses are sent in several messages; after an error some of them may be stored. Responses older than
        the epochs that the server keeps of the problem do not stay: a warning says so, and `stats().too_old` counts
        them.

        Args:
            prompt: tokens of the problem's prompt.
            responses: finished responses to it. Their `epoch` is ignored.
            epoch: version of the policy that sampled them; None: the newest of the namespace. The server refuses an
                epoch that is more than 2^20 ahead of the newest.
            problem: explicit problem id; None: the prompt identifies the problem.
            seeds: the sampling seed of each response (int64 or None), in place of their own `seed`.

        Raises:
            ValueError: an argument is malformed; nothing was sent.
            HistoSpecError: see `histospec.client.errors`.
        """
        run(self._connections.do(calls.ingest, *args, **kwargs))

    def history(self, prompt: Tokens, problem: str | None = None, limit: int | None = None) -> list[Response]:
        """Returns the stored responses of a problem, oldest first. The list is empty if there are none.

        It first sends what this client has committed, so the result normally contains that.

        Args:
            prompt: tokens of the problem's prompt.
            problem: explicit problem id; None: the prompt identifies the problem.
            limit: return at most this many, the newest; None: all.

        Raises:
            ValueError: an argument is malformed; nothing was sent.
            HistoSpecError: see `histospec.client.errors`.
        """
        self.flush(self.config.timeouts.shutdown)
        return run(self._connections.do(calls.history, prompt, problem, limit))[0]

    @same_as(calls.histories)
    def histories(self, *args: Any, **kwargs: Any) -> list[list[Response] | None]:
        """Returns the stored responses of many problems. Asks for several problems at a time.

        Args:
            prompts: one prompt for each problem.
            problems: None, or for each prompt an explicit problem id or None.
            limit: as for `history`.

        Returns:
            The responses of each problem; None if its shard cannot be reached. Such a shard gets no further requests.

        Raises:
            ValueError: an argument is malformed; nothing was sent.
            HistoSpecError: as for `history`, but not Unavailable.
        """
        self.flush(self.config.timeouts.shutdown)
        run(self._connections.find())
        plan = calls.histories(self._core, *args, **kwargs)
        return [None if answer is None else answer[0] for answer in run(self._connections.many(plan))]

    @same_as(calls.ingest_many)
    def ingest_many(self, *args: Any, **kwargs: Any) -> list[bool]:
        """Adds finished responses to the history of many problems. Sends several problems at a time.

        Args:
            prompts: one prompt for each problem.
            responses: for each problem its responses, as for `ingest`.
            epoch: as for `ingest`, the same for all.
            problems: None, or for each prompt an explicit problem id or None.
            seeds: None, or for each problem what `ingest` takes.

        Returns:
            For each problem, whether its responses are stored. False if its shard cannot be reached; such a shard
                gets no further requests.

        Raises:
            ValueError: an argument is malformed; nothing was sent.
            HistoSpecError: as for `ingest`, but not Unavailable.
        """
        run(self._connections.find())
        plan = calls.ingest_many(self._core, *args, **kwargs)
        return [answer is not None for answer in run(self._connections.many(plan))]

    @same_as(calls.predict_length)
    def predict_length(self, *args: Any, **kwargs: Any) -> LengthPrediction:
        """Predicts the length of a response that has more than `generated` tokens, as quantiles.

        Args:
            prompt: tokens of the problem's prompt.
            problem: explicit problem id; None: the prompt identifies the problem.
            generated: tokens generated so far.
            quantiles: each in [0, 1]; None: 0.1, 0.5, 0.9, 0.99.

        Raises:
            ValueError: an argument is malformed; nothing was sent.
            HistoSpecError: see `histospec.client.errors`.
        """
        return run(self._connections.do(calls.predict_length, *args, **kwargs))[0]

    @same_as(calls.predict_lengths)
    def predict_lengths(self, *args: Any, **kwargs: Any) -> list[LengthPrediction | None]:
        """Predicts the lengths of responses to many problems, in one call to each shard.

        Args:
            prompts: one prompt for each problem.
            problems: None, or for each prompt an explicit problem id or None.
            generated: None, or for each prompt the tokens generated so far.
            quantiles: as for `predict_length`, the same for all.

        Returns:
            The prediction for each problem; None if its shard cannot be reached.

        Raises:
            ValueError: an argument is malformed; nothing was sent.
            HistoSpecError: as for `predict_length`, but not Unavailable.
        """
        run(self._connections.find())
        asked = calls.predict_lengths(self._core, *args, **kwargs)
        return asked.in_order(run(self._connections.many(asked.calls)))

    def topology(self) -> list[Shard]:
        """Returns the shards of the service: the discovered ones, or those that the first endpoint knows."""
        run(self._connections.find())
        return calls.members(self._core) or run(self._connections.do(calls.topology))[0]

    def inspect(self, timeout: float | None = None) -> list[Inspection]:
        """Returns facts about every shard and the namespace. The command `histospec doctor` explains them.

        Args:
            timeout: seconds for each shard; None: `Timeouts.call`.

        Raises:
            HistoSpecError: see `histospec.client.errors`.
        """
        return run(self._connections.do(calls.inspect, timeout))

    def greet(self, timeout: float) -> list[Inspection]:
        """Returns the result of `inspect` for the shards that answer, and logs why others do not. For starting workers.

        Args:
            timeout: seconds for each shard.
        """
        return run(self._connections.greet(timeout))

    def drop_namespace(self) -> int:
        """Deletes everything in the namespace, on every shard. Returns how many responses it deleted."""
        return sum(run(self._connections.do(calls.drop_namespace)))

    def rewind(self, epoch: int) -> int:
        """Deletes every response of a newer epoch, on every shard. Returns how many responses it deleted.

        A trainer that goes back to a checkpoint calls this before it samples again.

        Args:
            epoch: the newest epoch to keep.
        """
        return sum(run(self._connections.do(calls.rewind, epoch)))

    # ---- the end --------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Sends waiting messages, for at most `Timeouts.shutdown` seconds, and closes the connections.

        Afterwards steps return empty drafts, and calls that need the server raise Unavailable.
        """
        if quiet_grpc.forked():  # the connections belong to the parent
            return
        self._rehearsals.end()
        if self._connections.begin_end():
            run(self._connections.send_last())
        self._connections.end()
        self._dropped.detach()

    def close(self, *args: Any, **kwargs: Any) -> None:
        """Calls `shutdown` without arguments, and `finish` with arguments."""
        if args or kwargs:
            self.finish(*args, **kwargs)
        else:
            self.shutdown()

    def __repr__(self) -> str:
        return f"<DraftClient {self._core.summary()}>"

    def __enter__(self) -> DraftClient:
        quiet_grpc.refuse_after_fork()
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a DraftClient holds connections and cannot be copied or pickled; make a new one instead")

    def __exit__(self, *exc: object) -> None:
        self.shutdown()
