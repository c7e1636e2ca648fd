"""Processes that end without shutdown: their finished responses are stored, or the log says how many are lost."""

import os
import signal
import subprocess
import sys

import pytest

from histospec.client import DraftClient
from tests.support.clients import texts
from tests.support.servers import Server, Starter

START = """
import asyncio, concurrent.futures, multiprocessing, os, signal, sys, threading, time
from histospec.client import AsyncDraftClient, DraftClient, Timeouts

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it

def client(face=DraftClient):
    return face(sys.argv[1], "run", deadline=30, timeouts=Timeouts(step=30, shutdown=float(sys.argv[2])))

def respond(client, text=[5, 6]):
    sessions = client.open([[1]])
    client.step(sessions, [text])
    client.finish(sessions)

async def respond_on_a_loop(client):
    sessions = await client.open([[1]])
    await client.step(sessions, [[5, 6]])
    await client.finish(sessions)
"""

PLAIN = "one = client(); respond(one)"
DROPPED = """
def main():
    respond(client())
main()
"""
EXIT = "one = client(); respond(one); sys.exit(3)"
ERROR = "one = client(); respond(one); raise RuntimeError('of the script')"
INTERRUPTED = "one = client(); respond(one); signal.raise_signal(signal.SIGINT)"
INTERRUPTED_STEP = """
one = client()
respond(one)
sessions = one.open([[2]])
signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
signal.setitimer(signal.ITIMER_REAL, 0.05)
while True:
    one.step(sessions, [[1]])
"""
TERMINATED_AS_RAY_DOES = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as Ray's workers do
one = client(); respond(one); os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)
"""
NEVER_CONNECTED = "one = client(); one.finish(one.open([[1]], generated=[[5, 6]]))"
IN_A_THREAD = """
def work():
    respond(client())
threading.Thread(target=work).start()
"""
AFTER_THE_MAIN_THREAD = """
one = client()
respond(one, [7])
def work():
    threading.main_thread().join()
    respond(one)
threading.Thread(target=work).start()
"""
IN_AN_EXECUTOR = """
one = client()
pool = concurrent.futures.ThreadPoolExecutor(1)
pool.submit(respond, one)
"""
FORKED = """
one = client()
worker = multiprocessing.get_context("fork").Process(target=respond, args=(one,))
worker.start(); worker.join(); sys.exit(worker.exitcode)
"""
FORKED_WITH_ITS_OWN = """
def work():
    global one
    one = client()
    respond(one)
worker = multiprocessing.get_context("fork").Process(target=work)
worker.start(); worker.join(); sys.exit(worker.exitcode)
"""
LOOP_CLOSED = "one = client(AsyncDraftClient); asyncio.run(respond_on_a_loop(one))"
LOOP_CLOSED_AND_DROPPED = """
async def main():
    await respond_on_a_loop(client(AsyncDraftClient))
asyncio.run(main())
"""
LOOP_OPEN = """
one = client(AsyncDraftClient)
loop = asyncio.new_event_loop()
loop.run_until_complete(respond_on_a_loop(one))
"""
LOOP_IN_A_THREAD = """
one = client(AsyncDraftClient)
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
asyncio.run_coroutine_threadsafe(respond_on_a_loop(one), loop).result()
"""
SHUT_DOWN_ON_ANOTHER_LOOP = LOOP_CLOSED + "; asyncio.run(one.shutdown())"

SCRIPTS = {name: script for name, script in globals().items() if isinstance(script, str) and name.isupper()}
del SCRIPTS["START"]


def ends(script: str, endpoint: str, patience: float) -> str:
    """Runs a script without shutdown. Returns what it logs about the end of its client."""
    command = [sys.executable, "-c", START + script, endpoint, str(patience)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode in (0, 1, 3, 130, -signal.SIGINT), done.stderr
    return "\n".join(line for line in done.stderr.splitlines() if line.startswith("HistoSpec: the client ends"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_had_finished_is_stored(name: str, server: Server) -> None:
    assert ends(SCRIPTS[name], server.endpoint, 60.0) == ""
    with DraftClient(server.endpoint, "run", deadline=30) as reader:
        assert [5, 6] in texts(reader.history([1]))


@pytest.mark.parametrize("name", ["PLAIN", "DROPPED", "FORKED", "LOOP_CLOSED", "LOOP_CLOSED_AND_DROPPED", "LOOP_OPEN"])
def test_what_a_server_did_not_acknowledge_is_named_once(name: str, start_server: Starter) -> None:
    lost = "HistoSpec: the client ends before the server acknowledged its finished responses: 1 is lost"
    assert ends(SCRIPTS[name], "127.0.0.1:9", 0.2) == lost
    server = start_server()
    stop = f"client.finish(sessions); os.kill({server.pid}, signal.SIGSTOP)"
    assert START.count("client.finish(sessions)") == 2
    hanging = START.replace("client.finish(sessions)", stop)
    command = [sys.executable, "-c", hanging + SCRIPTS[name], server.endpoint, "0.2"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert lost in done.stderr


def test_shutdown_names_what_is_lost_too(caplog: pytest.LogCaptureFixture) -> None:
    client = DraftClient("127.0.0.1:9", "run")
    client.finish(client.open([[1]], generated=[[5]]))
    client.shutdown()
    client.shutdown()
    assert [r.getMessage() for r in caplog.records if "is lost" in r.getMessage()] == [
        "HistoSpec: the client ends before the server acknowledged its finished responses: 1 is lost"
    ]
