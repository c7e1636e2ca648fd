"""The store's URL in a file: a new password reaches a running server and is never shown."""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.children import histospec
from tests.support.redis_processes import RedisProcess
from tests.support.servers import Server, Starter
from tests.support.waiting import eventually
from tests.support.wires import Connector

FIRST, SECOND, WRONG = "first-s3cret", "second-s3cret/?#", "wrong-s3cret"
QUOTED = "second-s3cret%2F%3F%23"


@pytest.fixture
def redis(start_redis: Callable[..., RedisProcess]) -> RedisProcess:
    return start_redis("--requirepass", FIRST, password=FIRST)


def put(file: Path, text: str) -> None:
    """Replaces a file atomically, as Kubernetes does with a mounted Secret."""
    new = file.with_name("new")
    new.write_text(text)
    os.replace(new, file)


def shown(server: Server) -> str:
    return json.dumps(server.log) + "".join(server.get(page)[1] for page in ("/status", "/healthz", "/metrics"))


def test_a_password_that_is_rotated_costs_nothing(
    start_server: Starter, connect: Connector, redis: RedisProcess, tmp_path: Path
) -> None:
    """
    1. A server reads the URL of its store from a file.
    2. Redis gets another password and drops its connections. An ingest waits; then the file follows, and the ingest is
       acknowledged. So are later ones, and all data is there.
    3. The file becomes unusable: the previous contents stay in force, and the server reports it.
    4. No output of the server shows a password.
    """
    file = tmp_path / "url"
    put(file, f"redis://:{FIRST}@{redis.where}\n")
    server = start_server("--store-file", str(file))
    wire = connect(server.endpoint)
    wire.ingest([1], [[5]])

    redis.client.config_set("requirepass", SECOND)
    redis.client.client_kill_filter(_type="normal", skipme=False)
    with ThreadPoolExecutor(1) as thread:
        ingest = thread.submit(wire.ingest, [1], [[6]])
        eventually(lambda: server.metrics()["histospec_store_waiting_bytes"] > 0)
        put(file, f"redis://:{QUOTED}@{redis.where}")
        assert ingest.result(60).responses == 1
    wire.ingest([1], [[7]])
    assert wire.history([1]) == [[5], [6], [7]]

    unreadable = 'histospec_watched_file_unreadable{file="store-file"}'
    assert server.metrics()[unreadable] == 0
    put(file, f"redis://:{WRONG}@")
    eventually(lambda: server.metrics()[unreadable] == 1)
    assert str(file) in json.loads(server.get("/status")[1])["unreadable_files"]["store-file"]
    wire.ingest([1], [[8]])
    assert json.loads(server.get("/status")[1])["store"] == "redis"
    assert server.running
    assert "s3cret" not in shown(server)


def test_a_server_whose_file_is_not_up_to_date_yet_waits_for_it(
    start_server: Starter, redis: RedisProcess, tmp_path: Path
) -> None:
    """A mounted Secret may follow a minute after the change of the password."""
    file = tmp_path / "url"
    put(file, f"redis://:{WRONG}@{redis.where}")
    server = start_server("--store-file", str(file), ready=False)
    eventually(lambda: "does not answer (invalid username-password pair" in server.get("/readyz")[1])
    put(file, f"redis://:{FIRST}@{redis.where}")
    eventually(lambda: server.get("/readyz")[0] == 200)
    assert "s3cret" not in shown(server)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "No such file or directory"),
        ("", "a Redis URL must start with one of redis://"),
        ("sqlite", "a Redis URL must start with one of redis://"),
        (f"redis://:{WRONG}@host:port", "a server is not of the form host:port"),
        (f"redis://:{WRONG}/@host:1", "the password has one of / ? # [ ]; write %2F %3F %23 %5B %5D instead"),
        (f"rediss://:{WRONG}@host:1?ca=/nowhere", "ca: /nowhere: no such file or directory; give a file of certif"),
    ],
)
def test_a_file_that_holds_no_url_ends_the_server_with_a_sentence(
    tmp_path: Path, text: str | None, sentence: str
) -> None:
    if text is not None:
        (tmp_path / "url").write_text(text)
    addresses = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
    code, said = histospec("serve", "--store-file", "url", *addresses, cwd=tmp_path).end()
    assert code == 2
    assert sentence.lower() in said.lower()
    assert "s3cret" not in said
