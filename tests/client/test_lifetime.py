"""Clients that are garbage-collected, copied or inherited by a forked process. Each test has a process of its own."""

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest

from histospec.client import AsyncDraftClient, DraftClient, Response
from histospec.client.quiet_grpc import VARIABLE
from tests.support.servers import Server

TEXT = list(range(50, 90))

START = """
import asyncio, gc, logging, os, sys, time
from histospec.client import AsyncDraftClient, DraftClient, Response, Timeouts, Unavailable

# Where the caller closed the loop first, gRPC may hear of the end of some calls only when another loop turns, and until
# then keeps their connections and what it runs on. A leak would be 40 descriptors.
GRPC_KEEPS = 24

endpoint, prompt, text = sys.argv[1], [1, 2, 3], list(range(50, 90))
logging.basicConfig()

def descriptors():
    return len(os.listdir("/proc/self/fd"))

def threads():
    return len(os.listdir("/proc/self/task"))

def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, (descriptors(), threads())
        time.sleep(0.01)

def use():
    client = DraftClient(endpoint, "run", deadline=5)
    sessions = client.open([prompt])
    assert len(client.step(sessions, [text[:5]])[0])
    client.history(prompt)
    return client

async def use_async():
    client = AsyncDraftClient(endpoint, "run", deadline=5)
    sessions = await client.open([prompt])
    assert len((await client.step(sessions, [text[:5]]))[0])
    await client.history(prompt)
    return client
"""

DROPPED = """
use().shutdown()
before = descriptors(), threads()
for i in range(100):
    use()
until(lambda: descriptors() <= before[0] and threads() <= before[1])
"""

DROPPED_WHILE_AN_ERROR_IS_HANDLED = """
use().shutdown()
before = descriptors()
for i in range(40):
    try:
        raise KeyError("of the caller, whose frames hold the client")
    except KeyError:
        client = use()
    del client
until(lambda: descriptors() <= before)
"""

DROPPED_IN_A_LOOP = """
async def run():
    await (await use_async()).shutdown()
    before = descriptors()
    for i in range(50):
        await use_async()
    end = time.monotonic() + 60
    while descriptors() > before:
        assert time.monotonic() < end, (before, descriptors())
        await asyncio.sleep(0.01)
asyncio.run(run())
"""

DROPPED_AFTER_THEIR_LOOP = """
asyncio.run(use_async())
before = descriptors()
for i in range(20):
    asyncio.run(use_async())
until(lambda: descriptors() <= before + GRPC_KEEPS)
for i in range(20):
    loop = asyncio.new_event_loop()
    client = loop.run_until_complete(use_async())
    loop.close()                       # with a stream on it
    del client, loop
for i in range(5):
    asyncio.run(use_async())           # gRPC hears of the ends of calls while a loop turns
gc.collect()
until(lambda: descriptors() <= before + GRPC_KEEPS)
"""

DROPPED_WITH_RESPONSES = """
said = []
class Handler(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("histospec.client").handlers = [Handler()]
logging.getLogger("histospec.client").propagate = False
client = DraftClient("127.0.0.1:9", "run", deadline=0.05)
sessions = client.open([prompt])
client.step(sessions, [text])
client.close(sessions)
del client
until(lambda: "HistoSpec: the client ends before the server acknowledged its finished responses: 1 is lost" in said)
"""

ALIVE_AT_EXIT = """
client = use()
client.send(client.open([prompt]), [text])
async def run():
    global other
    other = await use_async()
asyncio.run(run())
"""


def run(script: str, endpoint: str, **env: str) -> "subprocess.CompletedProcess[str]":
    environment = {k: v for k, v in os.environ.items() if k != VARIABLE}
    return subprocess.run(
        [sys.executable, "-c", START + script, endpoint],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment | env,
    )


@pytest.fixture
def endpoint(server: Server) -> str:
    with DraftClient(server.endpoint, "run") as client:
        client.ingest([1, 2, 3], [Response(TEXT)])
    return server.endpoint


@pytest.mark.parametrize(
    "script",
    [
        DROPPED,
        DROPPED_WHILE_AN_ERROR_IS_HANDLED,
        DROPPED_IN_A_LOOP,
        DROPPED_AFTER_THEIR_LOOP,
        DROPPED_WITH_RESPONSES,
        ALIVE_AT_EXIT,
    ],
    ids=["blocking", "while an error is handled", "async", "after their loop", "with responses", "at exit"],
)
def test_a_client_that_is_dropped_leaves_nothing_and_says_nothing(endpoint: str, server: Server, script: str) -> None:
    """No descriptor and no thread is left, no stream at the server before the process ends, and no log line."""
    before_exit = f"""
import urllib.request
def streams():
    with urllib.request.urlopen("http://{server.http}/metrics") as page:
        return [line for line in page.read().decode().splitlines() if line.startswith("histospec_streams ")]
until(lambda: streams() == ["histospec_streams 0.0"])
"""
    done = run(script + (before_exit if script is not ALIVE_AT_EXIT else ""), endpoint)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- fork -----------------------------------------------------------------------------------------------------------

BEFORE_CONNECTING = """
fresh = DraftClient(endpoint, "run", deadline=5)
pid = os.fork()
sessions = fresh.open([prompt])
assert len(fresh.step(sessions, [text[:5]])[0])
if pid:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""

AFTER_CONNECTING = """
used, fresh = use(), DraftClient(endpoint, "run")
sessions = used.open([prompt])
waits = used.send(sessions, [text[:5]])

def polled():
    return [sorted(line.split()[1] for line in open(f"/proc/self/fdinfo/{f}") if line.startswith("tfd"))
            for f in opened("eventpoll")]

def sockets():
    return sorted(opened("socket").values())

def opened(kind):
    links = {f: f"/proc/self/fd/{f}" for f in os.listdir("/proc/self/fd")}
    return {f: os.readlink(x) for f, x in links.items() if os.path.islink(x) and kind in os.readlink(x)}

before = polled(), sockets()
if not (pid := os.fork()):
    for client in (used, fresh, DraftClient(endpoint, "run")):
        for method, arguments in {
            "open": [[prompt]], "step": [sessions, [[1]]], "send": [sessions, [[1]]], "receive": [waits],
            "close": [sessions], "finish": [sessions], "flush": [], "stats": [], "inspect": [],
            "ingest": [prompt, [Response(text)]], "history": [prompt],
            "histories": [[prompt]], "ingest_many": [[prompt], [[Response(text)]]], "predict_length": [prompt],
            "predict_lengths": [[prompt]],
            "topology": [], "drop_namespace": [], "rewind": [1], "__enter__": [],
        }.items():
            try:
                getattr(client, method)(*arguments)
            except Unavailable as error:
                assert "forked" in str(error) and "spawn" in str(error) and "make a new client" in str(error)
            else:
                sys.exit(f"{method} should have raised")
        client.shutdown()
    async def refused():
        client = AsyncDraftClient(endpoint, "run")
        for call in (client.open([prompt]), client.history(prompt), client.flush()):
            try:
                await call
            except Unavailable:
                continue
            sys.exit("the async face should have raised")
    asyncio.run(refused())
    del client, used, fresh, waits
    gc.collect()
    until(lambda: threads() == 1)      # whatever the collector has started
    sys.exit(0) if sys.argv[2:] else os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert (polled(), sockets()) == before
assert len(used.receive(waits)[0])
assert len(used.step(sessions, [text[5:6]])[0]) and used.history(prompt)
assert (used.stats().failed, used.stats().reopened) == (0, 0)
"""

WITH_MULTIPROCESSING = """
import multiprocessing
client = use()
def child(queue):
    try:
        DraftClient(endpoint, "run").ingest(prompt, [Response(text)])
    except Unavailable as error:
        queue.put(str(error))
forking = multiprocessing.get_context("fork")
queue = forking.Queue()
process = forking.Process(target=child, args=(queue,))
process.start()
assert "forked" in queue.get(timeout=60)
process.join()
assert process.exitcode == 0
assert client.history(prompt)
"""


@pytest.mark.parametrize("core", [{}, {VARIABLE: "0"}], ids=["as it comes", "switched off"])
@pytest.mark.parametrize("script", [BEFORE_CONNECTING, AFTER_CONNECTING, WITH_MULTIPROCESSING])
def test_fork(endpoint: str, script: str, core: dict[str, str]) -> None:
    """A child of a process that has connected is told so by every method, at once; the parent does not notice it.

    gRPC says nothing and crashes nothing either, whatever is set for its own handling of forks.
    """
    for _ in range(3):
        done = run(script, endpoint, **core)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- copies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("face", [DraftClient, AsyncDraftClient])
@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_client_is_not_copied(
    face: type[DraftClient] | type[AsyncDraftClient], how: Callable[[object], object]
) -> None:
    with pytest.raises(TypeError, match=f"{face.__name__} holds connections and cannot be copied or pickled"):
        how(face("127.0.0.1:9", "run"))
