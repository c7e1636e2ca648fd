"""The thread that writes the log, on real descriptors."""

import json
import os
import subprocess
import sys

import pytest

from histospec.server.logs import output
from histospec.server.logs.lines import escaped
from histospec.server.logs.output import LogWriter
from tests.support.waiting import eventually


def test_lines_arrive_in_order() -> None:
    read, write = os.pipe()
    writer = LogWriter(write, lambda lines: None)
    for number in range(100):
        writer.write(f"{number}\n")
    assert writer.drain(60)
    assert os.read(read, 1 << 16).decode().split() == [str(number) for number in range(100)]
    assert writer.dropped == 0


def test_what_waits_is_bounded_and_what_is_dropped_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MOST_LINES", 10)
    read, write = os.pipe()
    told: list[int] = []
    writer = LogWriter(write, told.append)
    line = "x" * (1 << 16) + "\n"  # fills the pipe
    for _ in range(50):
        writer.write(line)
    assert writer.dropped >= 39
    assert not writer.drain(0.01)
    size = 0
    while not told or size < len(line) * (50 - writer.dropped):
        size += len(os.read(read, 1 << 20))
    eventually(lambda: sum(told) == writer.dropped, "the dropped lines are not told")


def test_a_descriptor_that_somebody_made_non_blocking_loses_nothing() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    writer = LogWriter(write, lambda lines: None)
    text = "x" * 999 + "\n"
    for _ in range(1000):
        writer.write(text)
    size = 0
    while size < 1000 * len(text):
        size += len(os.read(read, 1 << 16))
    assert writer.drain(60)
    assert writer.dropped == 0


def test_a_closed_descriptor_counts() -> None:
    writer = LogWriter(-1, lambda lines: None)
    for _ in range(5):
        writer.write("line\n")
    assert writer.drain(60)
    assert writer.dropped == 5


def test_what_is_not_printable_is_escaped() -> None:
    assert escaped("a\x1b[31m\n\u202eé") == "a\\x1b[31m\\n\\u202eé"


STRAY = """
import ctypes, logging, os, sys, threading, warnings
from histospec.server.logs.output import log_output
with log_output("json", "info"):
    os.write(2, b"E0000 00:00:1732284123.123456   13659 ssl.cc:12] it failed\\n")
    os.write(2, b"no end\\n" )
    print("printed", file=sys.stderr)
    logging.getLogger("aiohttp").warning("told %s", "me")
    warnings.warn("old")
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
print("after", file=sys.stderr)
"""


def test_stray_lines_join_the_log() -> None:
    ran = subprocess.run([sys.executable, "-c", STRAY], stderr=subprocess.PIPE, text=True, timeout=60)
    *lines, last = ran.stderr.splitlines()
    said = {entry["event"].split("\n")[0]: entry for entry in map(json.loads, lines)}
    core = said["it failed"]
    assert (core["level"], core["logger"], core["source"]) == ("error", "grpc", "ssl.cc:12")
    assert said["no end"]["logger"] == said["printed"]["logger"] == "stderr"
    assert (said["told me"]["level"], said["told me"]["logger"]) == ("warning", "aiohttp")
    assert [event for event in said if "UserWarning: old" in event]
    assert said["a thread failed"]["exception"][0]["exc_type"] == "ZeroDivisionError"
    assert last == "after"
