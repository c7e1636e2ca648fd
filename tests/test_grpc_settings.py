"""The settings of gRPC's core: set while it is imported, seen by the core, and gone afterwards."""

import os
import subprocess
import sys

import pytest

from histospec.protocol.grpc_settings import ONE_POLLER

(NAME,) = ONE_POLLER

# How often 300 messages to and fro woke a thread of the event engine. Timers wake it some 60 times per second, too.
# The script subtracts what they do in an idle time of the same length, after every tenth message: on a busy machine the
# messages take seconds, and what else runs there changes meanwhile.
SCRIPT = """
import os, queue, sys, time
import {module}
import grpc
assert os.environ.get({name!r}) == {value!r}, os.environ.get({name!r})
from concurrent.futures import ThreadPoolExecutor

def echo(messages, context):
    yield from messages

server = grpc.server(ThreadPoolExecutor(2))
handlers = {{"Echo": grpc.stream_stream_rpc_method_handler(echo)}}
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", handlers),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
sent = queue.SimpleQueue()
call = grpc.insecure_channel(f"127.0.0.1:{{port}}").stream_stream("/test.Test/Echo")(iter(sent.get, None))

def wakings():
    woken = 0
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{{thread}}/status") as file:
            facts = dict(line.split(":") for line in file if line.startswith(("Name:", "voluntary_ctxt_switches:")))
        if facts["Name"].strip() == "event_engine":
            woken += int(facts["voluntary_ctxt_switches"])
    return woken

by_messages = 0
for _ in range(30):
    before, start = wakings(), time.monotonic()
    for _ in range(10):
        sent.put(b"message")
        next(call)
    after, seconds = wakings(), time.monotonic() - start
    time.sleep(seconds)
    by_messages += (after - before) - (wakings() - after)
print(by_messages, flush=True)
os._exit(0)
"""


def woken(module: str, value: str | None) -> int:
    environment = {name: text for name, text in os.environ.items() if name != NAME}
    if value is not None:
        environment[NAME] = value
    script = SCRIPT.format(module=module, name=NAME, value=value)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")  # the core knows the settings: it would log an unknown one
    return int(done.stdout)


@pytest.mark.parametrize("module", ["histospec.client", "histospec.server.cli"])
def test_no_thread_of_the_event_engine_wakes_for_a_message(module: str) -> None:
    assert woken(module, None) < 150


def test_the_setting_of_the_environment_counts() -> None:
    """Here with an experiment that is on anyway, so the event engine stays on, too."""
    assert woken("histospec.client", "event_engine_client") > 300
