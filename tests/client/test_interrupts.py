"""KeyboardInterrupt at any moment of any call, as Ctrl-C and Jupyter raise it: the client remains usable.

One test interrupts the core at every line that it runs, and compares it with a model. The others interrupt whole
clients with real signals, each in a process of its own, because signals reach only the main thread.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import grpc
import numpy as np
import pytest

from histospec.client import DraftClient, Response
from histospec.client.config import configure
from histospec.client.core.core import Core
from histospec.client.core.message_limits import ServerLimits
from histospec.v1 import draft_pb2 as pb
from tests.support.servers import Server

ROUNDS = int(os.environ.get("HISTOSPEC_CHAOS_INTERRUPTS", "100"))
CORE = os.path.join("client", "core", "")


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line that code of the core runs in this thread, counted from 0."""

    def __init__(self, line: int) -> None:
        self.left = line
        self.where = ""

    def __enter__(self) -> "Interrupt":
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        # A signal handler runs between bytecodes, not between the end of a `with` block and the release of its lock,
        # which is where a line of the wrapper would be interrupted.
        if CORE not in frame.f_code.co_filename or frame.f_code.co_name == "locked":
            return self._trace if event == "call" else None
        if event == "line":
            self.left -= 1
            if self.left == -1:
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._trace


class Model:
    """A core and a server of one stream, which hears all messages at once."""

    def __init__(self) -> None:
        self.core = Core(configure("a=h:1,b=h:2", "run"), lambda: None, lambda: 0.0)
        self.streams: dict[Any, tuple[Any, dict[int, list[int]]]] = {}
        self.committed: list[list[int]] = []

    def serve(self) -> None:
        """Carries messages to the server and its answers back until nothing is left."""
        for shard in self.core.shards:
            while (state := shard.stream) is not None:
                known, held = self.streams.get(shard, (None, {}))
                if known is not state:
                    held = {}
                    self.streams[shard] = state, held
                    self.core.connected(shard, state, ServerLimits())
                    continue
                if not state.outbox:
                    break
                message = state.outbox.popleft()
                state.wrote(message.sequence)
                if (answer := self._answer(message, held)) is not None:
                    self.core.reply(shard, state, answer)

    def _answer(self, message: pb.DraftRequest, held: dict[int, list[int]]) -> pb.DraftResponse | None:
        for o in message.opens:
            assert o.session not in held
            held[o.session] = np.frombuffer(o.generated, "<i4").tolist()
        step = message.step
        sessions = np.frombuffer(step.sessions, "<u8").tolist()
        ends = np.cumsum(np.frombuffer(step.lengths, "<i4"))
        texts = np.split(np.frombuffer(step.tokens, "<i4"), ends)
        for session, position, new in zip(sessions, np.frombuffer(step.positions, "<i4"), texts, strict=False):
            assert len(held[session]) == position
            held[session] += new.tolist()
        for c in message.closes:
            text = held.pop(c.session)
            assert len(text) == c.generated
            if c.commit:
                self.committed.append(text)
        if not (sessions or any(c.commit for c in message.closes)):
            return None
        ones = np.ones(len(sessions), "<i4")
        return pb.DraftResponse(
            sequence=message.sequence, lengths=ones.tobytes(), tokens=ones.tobytes(), probs=ones.astype("<f4").tobytes()
        )

    def check(self, open_sessions: dict[int, list[int]], committed: list[list[int]]) -> None:
        """After one more step and a flush, all that has happened is known to the servers, and nothing else."""
        sessions = list(open_sessions)
        pending = self.core.send(sessions, [[9]] * len(sessions))
        self.serve()
        self.core.end_wait(pending)
        assert [len(draft) for draft in pending.drafts()] == [1] * len(sessions)
        while self.core.flush():
            self.serve()
        held = {n: text for shard in self.core.shards for n, text in self.streams[shard][1].items()}
        assert held == {n: [*text, 9] for n, text in open_sessions.items()}
        assert {*map(tuple, self.committed)} == {*map(tuple, committed)}  # each at least once
        stats = self.core.stats()
        assert (stats.pending_commits, stats.dropped_commits) == (0, 0)
        assert sum(shard.pending_bytes for shard in stats.shards.values()) == 0


PROMPTS = [[n] for n in range(6)]


def test_each_line_of_the_core_may_be_interrupted() -> None:
    """Opening, stepping, finishing, answers and ends are whole or did not happen; the server hears of all of them."""
    interrupted: set[str] = set()

    def run(line: int) -> bool:
        model = Model()
        core = model.core
        first, second, third, *rest = core.open(PROMPTS)
        texts: dict[int, list[int]] = {session: [] for session in (first, second, third, *rest)}
        committed: list[list[int]] = []

        def whole(call: Callable[[], object], effect: Callable[[], object], did: Callable[[], bool]) -> bool:
            """Calls; returns whether that was interrupted. `did`: whether it had taken effect all the same."""
            try:
                with interrupt:
                    call()
            except KeyboardInterrupt:
                interrupted.add(interrupt.where.partition(":")[0])
                core.stats()  # mends
                if call == model.serve:  # in the transport: the pump gives up its loop
                    core.lose_streams()
                if did():
                    effect()
                return True
            effect()
            return False

        def appended(new: dict[int, list[int]]) -> None:
            texts.update({session: texts[session] + tokens for session, tokens in new.items()})

        def ended(*sessions: int) -> None:
            committed.extend(text for session in sessions if (text := texts.pop(session)))

        def length(session: int) -> int:
            return core._open.by_number[session].length

        def gone() -> None:
            if (stream := core.shards[0].stream) is not None:  # an interrupt may have ended it
                core.end(core.shards[0], stream, grpc.StatusCode.UNAVAILABLE, "gone")

        interrupt = Interrupt(line)
        hit = [
            whole(
                lambda: core.send([first, second], [[1, 2], [3]]),
                lambda: appended({first: [1, 2], second: [3]}),
                lambda: length(first) == 2,
            ),
            whole(model.serve, lambda: None, lambda: True),
            whole(
                lambda: core.send(list(texts), [[4]] * len(texts)),
                lambda: appended({session: [4] for session in texts}),
                lambda: length(third) == 1,
            ),
            whole(
                lambda: core.finish([first, third], epochs=[1, 2]),
                lambda: ended(first, third),
                lambda: first not in core._open.by_number,
            ),
            whole(model.serve, lambda: None, lambda: True),
            whole(
                lambda: core.finish([second], commit=False),
                lambda: texts.pop(second),
                lambda: second not in core._open.by_number,
            ),
            whole(core.flush, lambda: None, lambda: True),
            whole(gone, lambda: None, lambda: True),
            whole(lambda: core.begin(core.prepare([[99]])), lambda: None, lambda: True),
        ]
        texts |= {number: [] for number, session in core._open.by_number.items() if session.prompt == b"\x63\0\0\0"}
        model.check(texts, committed)
        return any(hit)

    line = 0
    while run(line):
        line += 1
    assert line > 300
    assert {*interrupted} >= {"append", "keep", "ask", "queue_step", "interpret"}


# ---- whole clients and real signals -------------------------------------------------------------------------------

START = """
import asyncio, os, random, signal, sys, threading, time
import logging
from histospec.client import Breaker, DraftClient, Response, Timeouts

logging.disable(logging.WARNING)
endpoint, namespace, rounds, chance = sys.argv[1], sys.argv[2], int(sys.argv[3]), random.Random(int(sys.argv[4]))
text = list(range(100, 400))

armed = False

def interrupted(*_):
    if armed:                                  # the signal of a timer may come after the timer was stopped
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupted)

def interrupt(call, longest):
    "Calls, and interrupts it after a random time. Returns whether that ended it."
    global armed
    try:
        try:
            armed = True
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, longest))
            call()
        finally:
            armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    return False

def check(client):
    "The client drafts, commits and holds no more sessions than its caller knows; asyncio is usable."
    assert asyncio._get_running_loop() is None, "asyncio is left running"
    asyncio.run(asyncio.sleep(0))
    (session,) = client.open([[1, 0]])
    client.step([session], [text[:5]])
    steps = 0
    while not len(client.step([session], [[]])[0]):
        steps += 1
        assert steps < 20, f"no drafts in {steps} steps: {client!r} {client.stats()}"
    client.finish([session], commit=False)
    client.flush(30)
    stats = client.stats()
    assert stats.pending_commits == 0, stats
    assert stats.dropped_commits == 0, stats
    assert f"sessions={len(known)} " in repr(client), (repr(client), known)

known = set()
"""

ANY_CALL = """
count = 0
client = DraftClient(endpoint, namespace, deadline=5, breaker=Breaker(failures=20))

def open():
    sessions = client.open([[1, n] for n in range(chance.randrange(1, 5))])
    known.update(sessions)

def step():
    if known:
        sessions = list(known)
        n = chance.randrange(200)              # mostly as in the history, from which the server learns to draft
        client.step(sessions, [text[n : n + 5] for _ in sessions])

def finish():
    ending = list(known)[:chance.randrange(1, 4)]
    try:
        client.finish(ending, commit=chance.random() < 0.7)
        known.difference_update(ending)
    except KeyboardInterrupt:
        try:                                   # whole or not at all
            client.finish(ending, commit=False)
        except KeyError as error:
            assert str(ending[0]) in str(error), (ending, error)
        known.difference_update(ending)
        raise

calls = {
    open: 5e-4, step: 3e-3, finish: 5e-4, (lambda: client.flush(5)): 3e-3,
    (lambda: client.history([1, 0], limit=2)): 3e-3,
    (lambda: client.histories([[1, n] for n in range(8)], limit=1)): 6e-3,
    (lambda: client.ingest([2, 0], [Response([1, 2, 3])], epoch=0)): 4e-3,
    (lambda: client.predict_length([1, 0])): 2e-3,
    (lambda: client.topology()): 2e-3,
    (lambda: client.stats()): 1e-4,
}
hit = 0
for _ in range(rounds):
    for _ in range(chance.randrange(1, 6)):
        call = chance.choice(list(calls))
        call()
    call = chance.choice(list(calls))
    hit += interrupt(call, calls[call])
    check(client)
    if chance.random() < 0.1:
        while interrupt(client.shutdown, 2e-3):
            assert asyncio._get_running_loop() is None
            hit += 1
        assert not client._pump.used
        known.clear()
        client = DraftClient(endpoint, namespace, deadline=5, breaker=Breaker(failures=20))
client.shutdown()
print(hit)
"""

FIRST_CONNECTIONS = """
hit = 0
for _ in range(3 * rounds):
    client = DraftClient(endpoint, namespace, deadline=5, breaker=Breaker(failures=20))
    sessions = client.open([[1, 0]])
    hit += interrupt(lambda: client.step(sessions, [[1]]), 4e-3)
    if chance.random() < 0.5:
        client.step(sessions, [[2]])
    while interrupt(client.shutdown, 2e-3):    # with the last connection goes what gRPC has for all of them
        hit += 1
print(hit)
"""

WITH_OTHER_THREADS = """
client = DraftClient(endpoint, namespace, deadline=5, breaker=Breaker(failures=1000))
over, errors, steps = threading.Event(), [], [0, 0, 0]

def work(i):
    try:
        while not over.is_set():
            (session,) = client.open([[1, 0]])
            for n in range(5):
                client.step([session], [text[n : n + 1]])
            client.finish([session])
            client.flush(5)
            steps[i] += 1
    except BaseException as error:
        errors.append(error)

threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(steps))]
for thread in threads:
    thread.start()
hit = 0
for _ in range(rounds):
    before = list(steps)
    sessions = client.open([[1, 0]])
    hit += interrupt(lambda: [client.step(sessions, [[n]]) for n in range(20)], 1e-2)
    client.finish(sessions, commit=False)
    until = time.monotonic() + 120
    while any(a == b for a, b in zip(before, steps)):
        assert not errors, errors
        assert time.monotonic() < until, ("a thread does not go on", steps, client, client.stats())
        time.sleep(0.001)
over.set()
for thread in threads:
    thread.join(120)
    assert not thread.is_alive()
assert not errors, errors
client.flush(30)
assert client.stats().pending_commits == 0
client.shutdown()
print(hit)
"""

INSIDE_A_LOOP = """
async def cell():
    client = DraftClient(endpoint, namespace, deadline=5)    # as in Jupyter, whose loop runs in this thread
    hit = 0
    for _ in range(rounds):
        sessions = client.open([[1, 0]])
        hit += interrupt(lambda: [client.step(sessions, [[n]]) for n in range(20)], 1e-2)
        assert asyncio._get_running_loop() is asyncio.get_running_loop()
        (other,) = client.open([[1, 0]])
        client.step([other], [text[:5]])
        steps = 0
        while not len(client.step([other], [[]])[0]):
            steps += 1
            assert steps < 20
        client.finish([*sessions, other], commit=False)
    client.shutdown()
    print(hit)
asyncio.run(cell())
"""

DURING_A_HANG = """
import socket
silent = socket.socket()
silent.bind(("127.0.0.1", 0))
silent.listen()
client = DraftClient(f"127.0.0.1:{silent.getsockname()[1]}", namespace, timeouts=Timeouts(call=3600))
while not interrupt(lambda: client.histories([[n] for n in range(40)]), 0.5):
    pass
client.shutdown()
print(rounds)
"""


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize(
    "script",
    [ANY_CALL, FIRST_CONNECTIONS, WITH_OTHER_THREADS, INSIDE_A_LOOP, DURING_A_HANG],
    ids=["any call", "first connections", "with other threads", "inside a loop", "during a hang"],
)
def test_a_client_works_on_after_an_interrupt(
    shared_server: Server, request: pytest.FixtureRequest, script: str, seed: int
) -> None:
    """Neither a call nor the end of the process waits for calls that were interrupted and have an hour."""
    namespace = request.node.callspec.id.replace(" ", "-")
    with DraftClient(shared_server.endpoint, namespace) as client:
        client.ingest([1, 0], [Response(list(range(100, 400)))], epoch=0)
    words = [START + script, shared_server.endpoint, namespace, str(ROUNDS), str(seed)]
    command = [sys.executable, "-X", "faulthandler", "-c", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    # Not without a word: Python warns of a coroutine whose task an interrupt prevented, gRPC of one in its callback.
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > ROUNDS // 5
