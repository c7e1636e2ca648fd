"""The answers of the HTTP port, and its page as part of the package."""

import asyncio
import gzip
import json
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib import resources
from pathlib import Path

import pytest

from histospec.client import DraftClient, Response
from histospec.native import Engine
from histospec.server.history.counts import Counts
from histospec.server.history.namespaces import Progress
from histospec.server.history.tenants import Tenants
from histospec.server.logs.lines import RecentLines
from histospec.server.observability.metrics import Metrics
from histospec.server.observability.overview import Overview
from histospec.server.observability.runs import MAX_NAMESPACES
from histospec.server.observability.web import PAGE
from histospec.server.open_store import open_store
from histospec.server.security.access import Access
from histospec.server.security.rejections import Rejections
from histospec.server.settings.addresses import ShardAddress
from histospec.server.settings.config import Config
from tests.support.servers import Server, Starter

PACKAGED = """
import json
from setuptools.command.build_py import build_py
from distutils.core import run_setup
command = build_py(run_setup("setup.py", stop_after="init"))
command.finalize_options()
print(json.dumps([f"{package}/{name}" for package, _, _, names in command.data_files for name in names]))
"""


def test_the_page_is_in_the_wheel() -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", PACKAGED], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    packaged = set(json.loads(done.stdout.splitlines()[-1]))
    assert {f"histospec.server.observability.page/{name}" for name, _ in PAGE.values()} <= packaged
    there = {file.name for file in (resources.files("histospec.server.observability") / "page").iterdir()}
    assert there == {name for name, _ in PAGE.values()}


@pytest.mark.parametrize("path", PAGE)
def test_the_page_needs_nobody_else(shared_server: Server, path: str) -> None:
    status, text = shared_server.get(path)
    assert status == 200
    assert "https://" not in text
    assert text.count("http://") == text.count("http://www.w3.org/2000/svg")  # an XML name, never requested


def test_nothing_else_is_served(shared_server: Server) -> None:
    for path in ("/page/page.js", "/../config.py", "/%2e%2e/config.py", "/index.html"):
        assert shared_server.get(path)[0] == 404


def test_status_says_numbers_and_names_alone(shared_server: Server) -> None:
    with DraftClient(shared_server.endpoint, namespace="run") as client:
        client.ingest([4711, 4712], [Response([4713, 4714])], epoch=3)
    status = json.loads(shared_server.get("/status")[1])
    [row] = [row for row in status["namespaces"] if row["name"] == "run"]
    assert status["store"] == "sqlite"
    assert status["ready"]
    assert [shard["state"] for shard in status["shards"]] == ["SERVING"]
    assert (row["problems"], row["history_responses"], row["history_tokens"], row["newest_epoch"]) == (1, 1, 2, 3)
    assert not any(str(token) in json.dumps(status["namespaces"]) for token in range(4711, 4715))


@pytest.mark.parametrize("accepted", ["gzip, deflate", "identity"])
def test_status_is_compressed_where_that_is_asked_for(shared_server: Server, accepted: str) -> None:
    request = urllib.request.Request(f"http://{shared_server.http}/status", headers={"Accept-Encoding": accepted})
    with urllib.request.urlopen(request, timeout=60) as answer:
        body = answer.read()
        assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
        assert (answer.headers["Content-Encoding"] == "gzip") is accepted.startswith("gzip")
    assert json.loads(gzip.decompress(body) if accepted.startswith("gzip") else body)["ready"]


def test_namespaces_are_bounded(start_server: Starter) -> None:
    """The largest namespaces are listed; those with running sessions come first."""
    server = start_server()
    for number in range(MAX_NAMESPACES + 5):
        with DraftClient(server.endpoint, namespace=f"run-{number}") as client:
            client.ingest([1], [Response([2] * (number + 1))])
    with DraftClient(server.endpoint, namespace="small", deadline=5.0) as client:
        client.step(client.open([[1]]), [[2]])
        status = json.loads(server.get("/status")[1])
    names = [row["name"] for row in status["namespaces"]]
    assert len(names) == MAX_NAMESPACES
    assert names[:2] == ["small", f"run-{MAX_NAMESPACES + 4}"]
    assert "run-0" not in names
    assert status["namespaces_in_all"] == MAX_NAMESPACES + 6


def test_a_dropped_namespace_is_in_no_state_that_the_status_keeps(tmp_path: Path) -> None:
    """A reused name does not take anything from the counters of the last ten minutes."""
    engine = Engine(1 << 24)
    metrics = Metrics(engine, Counts())
    config = Config(data_dir=tmp_path)
    me = ShardAddress("me", config.listen)
    with ThreadPoolExecutor(1) as aside, closing(open_store(config, "me")) as store:
        tenants = Tenants(Access(None), engine)
        overview = Overview(
            config, metrics, dict, me, {}, RecentLines(), [], store, lambda _: Progress(4), tenants, Rejections(), aside
        )
        for name in ("stays", "goes"):
            engine.ingest(name, [1], [[2, 3]])
            for _ in range(5):
                engine.close(engine.open(name, [1]), commit=False)
        overview.sample()
        engine.drop_namespace("goes")
        overview.sample()
        assert all(set(state) == {"stays"} for _, state in overview._runs._states)
        status = asyncio.run(overview.show())
        assert [row["name"] for row in status["namespaces"]] == ["stays"]
        assert (status["namespaces_in_all"], status["totals"]["lookups_hit"]) == (1, 10)
        engine.drop_namespace("stays")
        engine.ingest("stays", [1], [[2, 3]])
        engine.close(engine.open("stays", [1]), commit=False)
        overview.sample()
        [facts] = overview._runs.facts()
        assert (facts.hits, facts.misses, facts.newest_epoch) == (1, 0, 4)
