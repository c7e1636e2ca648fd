"""The durability of the history: every acknowledged response is there after any failure of the server."""

import json
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest

from histospec.v1 import draft_pb2 as pb
from tests.support.servers import Starter
from tests.support.waiting import eventually
from tests.support.wires import Connector

RESPONSES = 1000
CLIENTS = 16


def response(number: int) -> list[int]:
    """Returns a unique response: its number, then tokens that depend on it."""
    return [number, *np.random.default_rng(number).integers(0, 150_000, 300).tolist()]


def prompt(number: int) -> list[int]:
    return [1, 2, number % 100]


def test_a_server_killed_amid_ingests_has_every_acknowledged_response(
    start_server: Starter, connect: Connector
) -> None:
    """
    1. Sixteen clients ingest 1,000 responses, one per request; as many sessions commit theirs on streams.
    2. After about a third is acknowledged, SIGKILL ends the server.
    3. Restarted on the same directory, it has every acknowledged response, whole, at most once, and no other.
    """
    server = start_server()
    acknowledged: list[int] = []
    enough = threading.Event()

    def ingest(client: int) -> None:
        wire = connect(server.endpoint)
        for number in range(client, RESPONSES, CLIENTS):
            try:
                wire.ingest(prompt(number), [response(number)], epoch=number % 5)
            except grpc.RpcError:
                return
            acknowledged.append(number)
            if len(acknowledged) > RESPONSES // 3:
                enough.set()

    def commit(client: int) -> None:
        wire = connect(server.endpoint)
        stream = wire.stream()
        for number in range(RESPONSES + client, 2 * RESPONSES, CLIENTS):
            tokens = response(number)
            try:
                stream.ask(
                    opens=[wire.open(number, prompt(number))],
                    step=wire.step([number], [tokens], max_tokens=0),
                    closes=[wire.commit(number, len(tokens), epoch=number % 5)],
                )
            except (grpc.RpcError, StopIteration):
                return
            acknowledged.append(number)

    with ThreadPoolExecutor(2 * CLIENTS) as clients:
        running = [clients.submit(work, client) for client in range(CLIENTS) for work in (ingest, commit)]
        assert enough.wait(120)
        server.kill()
        for client in running:
            client.result()
    assert RESPONSES // 3 < len(acknowledged) < 2 * RESPONSES

    server.start()
    wire = connect(server.endpoint)
    found = [tokens for shared in range(100) for tokens in wire.history(prompt(shared), wait=True)]
    numbers = [tokens[0] for tokens in found]
    assert set(acknowledged) <= set(numbers)
    assert len(numbers) == len(set(numbers))
    assert all(tokens == response(tokens[0]) for tokens in found)
    # The index has them, too, not only the store.
    assert server.metrics()["histospec_loaded_responses"] == len(found)
    assert server.metrics()["histospec_history_tokens"] == sum(map(len, found))
    stream, number = wire.stream(), random.Random(0).choice(acknowledged)
    [draft] = wire.drafts(
        stream.ask(opens=[wire.open(1, prompt(number))], step=wire.step([1], [response(number)[:20]]))
    )
    assert draft[:1] == response(number)[20:21]


def test_a_full_disk_refuses_ingests_and_nothing_else(start_server: Starter, connect: Connector, disk: Path) -> None:
    """
    1. The disk fills up during ingests: the first one that does not fit is refused as RESOURCE_EXHAUSTED.
    2. Drafts continue; a commit is refused in its answer, which still has drafts for others.
    3. Space is freed: the same server accepts responses again.
    4. After a restart, everything acknowledged is there.
    """
    server = start_server(name="disk/data")
    wire = connect(server.endpoint)
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(1 << 20))
    stream = wire.stream()
    long = np.random.default_rng(0).integers(0, 150_000, 6000).tolist()
    stream.ask(
        opens=[wire.open(1, [50]), wire.open(2, [50]), wire.open(3, [60])],
        step=wire.step([1, 2, 3], [[5, 6, 7, 8], [5, 6], long]),
    )

    acknowledged = []

    def fill() -> None:
        for number in range(1000):
            wire.ingest([1, 2, 3], [response(number) * 10])
            acknowledged.append(number)

    with pytest.raises(grpc.RpcError) as caught:
        fill()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "disk" in str(caught.value.details())
    assert acknowledged
    refused = server.metrics()["histospec_store_errors_total"]
    assert refused == 1

    answer = stream.ask(closes=[wire.commit(3, len(long))])
    assert answer.refusals[0].session == 3
    assert "disk" in answer.refusals[0].reason
    answer = stream.ask(closes=[wire.commit(1, 4)])  # a small response may still fit
    assert wire.drafts(stream.ask(step=wire.step([2], [[7]], [2])))[0][:1] == [8]
    assert server.metrics()["histospec_store_errors_total"] == refused + 1 + len(answer.refusals)
    assert server.get("/readyz")[0] == 200

    ballast.unlink()
    wire.ingest([9], [response(5000)])
    server.restart()
    assert wire.history([9], wait=True) == [response(5000)]
    assert wire.history([60]) == []
    assert wire.history([1, 2, 3]) == [response(number) * 10 for number in acknowledged]


def test_logprobs_rewards_masks_seeds_and_names_survive(start_server: Starter, connect: Connector) -> None:
    server = start_server()
    wire = connect(server.endpoint)
    sent = pb.Response(
        tokens=wire.i32([5, 6, 7]), logprobs=np.array([-0.5, -1, -2], "<f4").tobytes(), reward=0.25,
        generated=b"\1\0\1", seed=-7,
    )  # fmt: skip
    wire.stub.Ingest(
        pb.IngestRequest(namespace="run", prompt=wire.i32([1]), problem="named", responses=[sent], epoch=2**31)
    )
    server.kill()
    server.start()
    # Any of its prompts finds a named problem.
    request = pb.HistoryRequest(namespace="run", prompt=wire.i32([3, 4]), problem="named")
    [stored] = wire.stub.History(request, wait_for_ready=True).responses
    sent.epoch = 2**31
    assert stored == sent
    # The newest epoch is known again, too.
    wire.ingest([2], [[9]])
    assert wire.stub.History(pb.HistoryRequest(namespace="run", prompt=wire.i32([2]))).responses[0].epoch == 2**31


def test_the_window_of_epochs_slides_in_store_and_index(start_server: Starter, connect: Connector) -> None:
    server = start_server("--history-epochs", "2")
    wire = connect(server.endpoint)
    for epoch in range(5):
        wire.ingest([1], [[epoch, 10]], epoch=epoch)
        wire.ingest([2, epoch], [[epoch, 20]], epoch=epoch, problem="named")
    wire.ingest([3], [[0, 30]], epoch=0)  # each problem has its own window
    for _ in range(2):
        assert wire.history([1], wait=True) == [[3, 10], [4, 10]]
        assert wire.history([0], problem="named") == [[3, 20], [4, 20]]
        assert wire.history([3]) == [[0, 30]]
        server.restart()
    assert server.metrics()["histospec_loaded_responses"] == 5


def test_a_dropped_namespace_stays_dropped(start_server: Starter, connect: Connector) -> None:
    server = start_server()
    wire = connect(server.endpoint)
    wire.ingest([1], [[5]], namespace="a")
    wire.ingest([1], [[6]], namespace="b")
    wire.stub.DropNamespace(pb.DropNamespaceRequest(namespace="a"))
    server.kill()
    server.start()
    assert wire.history([1], namespace="a", wait=True) == []
    assert wire.history([1], namespace="b") == [[6]]


def test_a_store_whose_file_is_gone_acknowledges_nothing_and_drafts_on(
    start_server: Starter, connect: Connector
) -> None:
    """
    1. The file is deleted while the server runs: ingests and commits are refused, and every channel reports it.
    2. Drafts continue.
    3. A new server on the directory starts empty; a server killed meanwhile has lost nothing acknowledged.
    """
    server = start_server()
    wire = connect(server.endpoint)
    wire.ingest([1, 2, 3], [response(1)])
    stream = wire.stream()
    stream.ask(opens=[wire.open(1, [1, 2, 3]), wire.open(2, [1, 2, 3])], step=wire.step([1, 2], [response(1)[:9]] * 2))
    assert server.metrics()["histospec_store_usable"] == 1
    (server.data_dir / "histospec.sqlite").rename(server.data_dir / "away")
    eventually(lambda: server.metrics()["histospec_store_usable"] == 0, "the metric does not say so")  # idle or not
    with pytest.raises(grpc.RpcError, match=r"histospec.sqlite was deleted or moved while the server") as caught:
        wire.ingest([1, 2, 3], [response(2)])
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    answer = stream.ask(closes=[wire.commit(1, 9)])
    assert answer.refusals[0].later
    assert "deleted or moved" in answer.refusals[0].reason
    (draft,) = wire.drafts(stream.ask(step=wire.step([2], [response(1)[9:10]], [9])))
    assert draft[:1] == response(1)[10:11]
    health = json.loads(server.get("/healthz")[1])
    assert "deleted or moved" in health["parts"]["store"]
    assert server.get("/readyz")[0] == 200
    assert "Nothing can be stored" in {hint["title"] for hint in json.loads(server.get("/status")[1])["hints"]}
    server.logged("nothing can be stored")
    assert server.metrics()["histospec_store_errors_total"] == 2

    (server.data_dir / "away").rename(server.data_dir / "histospec.sqlite")
    wire.ingest([1, 2, 3], [response(3)])
    server.restart()
    assert wire.history([1, 2, 3], wait=True) == [response(1), response(3)]


def test_a_damaged_file_is_served_and_set_aside(start_server: Starter, connect: Connector) -> None:
    """
    1. Pages of the file are overwritten while no server runs.
    2. The next server serves the rest, reports how much is missing, and accepts responses.
    3. After another restart, the same, and no further file is set aside.
    """
    server = start_server()
    wire = connect(server.endpoint)
    for number in range(60):
        wire.ingest(prompt(number), [response(number)])
    server.drain()
    file = server.data_dir / "histospec.sqlite"
    data = bytearray(file.read_bytes())
    data[15 * 4096 : 16 * 4096] = bytes(4096)
    file.write_bytes(data)
    server.start()

    def found() -> set[int]:
        return {number for number in range(60) if wire.history(prompt(number), wait=True) == [response(number)]}

    lost = server.metrics()["histospec_store_damaged_responses_total"]
    there = found()
    assert 0 < lost < 10
    assert len(there) == 60 - lost
    assert server.metrics()["histospec_loaded_responses"] == len(there)
    (aside,) = server.data_dir.glob("histospec.sqlite.damaged-*Z")
    assert aside.read_bytes() == data
    assert "The store was damaged" in {hint["title"] for hint in json.loads(server.get("/status")[1])["hints"]}
    wire.ingest([9, 9], [response(99)])
    server.restart()
    assert found() == there
    assert wire.history([9, 9]) == [response(99)]
    assert len(list(server.data_dir.glob("histospec.sqlite.damaged-*Z"))) == 1
    assert not [line for line in server.log if "exception" in line]


@pytest.mark.parametrize("name", ["histospec.sqlite", "histospec.sqlite-wal"])
def test_a_file_that_is_truncated_while_the_server_runs_takes_no_later_response_along(
    start_server: Starter, connect: Connector, tmp_path: Path, name: str
) -> None:
    """
    1. The database or its log is truncated in place: no write follows, and the metric, the hint and a backup report it.
    2. Later responses are acknowledged, and there after SIGKILL.
    3. The backup removes no older one, not even after the restart.
    """
    server = start_server()
    wire = connect(server.endpoint)
    for number in range(60):
        wire.ingest(prompt(number), [response(number)])
    backups = tmp_path / "backups"
    backups.mkdir()
    command = [sys.executable, "-m", "histospec.server", "snapshot", f"{backups}/", "--keep", "1"]
    command += ["--from", server.endpoint]
    assert subprocess.run(command, cwd="/", capture_output=True, timeout=120).returncode == 0
    (good,) = backups.iterdir()
    good = good.rename(good.with_name("2020-01-01T00-00-00Z.jsonl.gz"))

    os.truncate(server.data_dir / name, 5000)
    eventually(lambda: server.metrics()["histospec_store_damaged_responses_total"] >= 1, "the loss is not counted")
    assert "The store was damaged" in {hint["title"] for hint in json.loads(server.get("/status")[1])["hints"]}
    for number in range(100, 180):
        wire.ingest([9, number], [response(number)])
    for _ in range(2):
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=120)
        assert done.returncode == 1
        assert "are damaged and left out" in done.stderr
        assert good.exists()
        server.kill()
        server.start()
        assert all(wire.history([9, number], wait=True) == [response(number)] for number in range(100, 180))
