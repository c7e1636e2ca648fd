"""A snapshot of a running service and its restore to another one: everything once, for any number of shards."""

import gzip
import json
import signal
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from histospec.protocol import placement
from histospec.server.commands import shards
from histospec.server.commands.shards import ShardsError
from histospec.server.commands.snapshot import Exported
from histospec.server.stores.interface import Problem, ResponseBatch
from histospec.v1 import draft_pb2 as pb
from tests.server.commands.conftest import Run
from tests.support import children
from tests.support.batches import batch
from tests.support.contents import BATCHES, STATE, content, large, on_disk, restorable, tokens
from tests.support.exports import export, problems
from tests.support.histories import expected, found, write, writings
from tests.support.odd_server import OddServer
from tests.support.redis_processes import RedisProcess
from tests.support.servers import Server, Starter
from tests.support.waiting import eventually
from tests.support.wires import Connector


def listed(servers: list[Server]) -> str:
    """Returns the endpoints of all shards for clients, with names."""
    return ",".join(f"shard-{number}={server.endpoint}" for number, server in enumerate(servers))


def service(start: Starter, name: str, number: int) -> list[Server]:
    return [start(name=f"{name}-{i}") for i in range(number)]


def test_three_shards_become_two(run: Run, start_server: Starter, tmp_path: Path) -> None:
    """A client of the new service finds every problem, with all its responses and their data."""
    old, new = service(start_server, "old", 3), service(start_server, "new", 2)
    written = writings(seed=20)
    write(listed(old), written)
    assert found(listed(old), written) == expected(written)
    file = tmp_path / "all.jsonl.gz"
    code, said = run("snapshot", file, "--from", listed(old), "--shards", "3")
    responses = sum(len(some) for one in written for some in one.responses.values())
    assert (code, said.rpartition(", ")[0]) == (0, f"{file}: {len(written)} problems, {responses} responses")
    code, said = run("restore", file, "--to", listed(new), "--shards", "2")
    assert (code, said.rpartition(", ")[0]) == (0, f"{file}: {len(written)} problems, {responses} responses")
    assert found(listed(new), written) == expected(written)
    for server in old:
        server.stop()
    assert found(listed(new), written) == expected(written)
    with gzip.open(file) as lines:
        names = [(line["namespace"], line.get("id", tuple(line["prompt"]))) for line in map(json.loads, lines)]
    assert len(names) == len(set(names)) == len(written)


def test_what_is_there_is_left_alone_unless_it_is_merged(
    run: Run, start_server: Starter, tmp_path: Path, connect: Connector
) -> None:
    old, new = service(start_server, "old", 2), service(start_server, "new", 3)
    written = writings(seed=21)
    write(listed(old), written)
    write(listed(new), [written[0]._replace(responses={0: written[0].responses[0][:1]})])
    before = [problems(export(connect(server.endpoint).stub)) for server in new]
    file = tmp_path / "all.jsonl"
    run("snapshot", file, "--from", listed(old))
    code, said = run("restore", file, "--to", listed(new))
    assert code == 2
    assert f"the store of {listed(new)} already has namespace 'run-1'" in said
    assert "a drop would delete its history from this store, also for every other service that uses the store" in said
    assert [problems(export(connect(server.endpoint).stub)) for server in new] == before
    assert run("restore", file, "--to", listed(new), "--merge")[0] == 0
    assert found(listed(new), written) == expected(written)
    assert "0 responses, 0 tokens" in run("restore", file, "--to", listed(new), "--merge")[1]
    assert found(listed(new), written) == expected(written)


def test_a_problem_that_moved_between_shards_is_one_line(run: Run, start_server: Starter, tmp_path: Path) -> None:
    """After a change of the shards, both the old and the new owner of a problem hold some of it."""
    rows = [(0, BATCHES[0]), (1, BATCHES[1]), (0, BATCHES[3]), (1, batch(tokens(9), 7, tokens(3), name="turns"))]
    for shard in range(2):
        store = on_disk(tmp_path, f"shard-{shard}")
        for mine, some in rows:
            if mine == shard:
                store.append(some).result()
        store.save_estimator("run", STATE).result()
        store.close()
    servers = service(start_server, "shard", 2)
    file = tmp_path / "all.jsonl"
    assert run("snapshot", file, "--from", listed(servers))[1].startswith(f"{file}: 2 problems, 6 responses")
    lines = list(map(json.loads, file.read_text().splitlines()))
    assert [(line.get("id"), [r["epoch"] for r in line["responses"]]) for line in lines] == [
        (None, [0, 0, 2**31]),
        ("turns", [1, 1, 7]),
    ]
    assert ["estimator" in line for line in lines] == [True, False]


def test_a_shard_that_lost_its_volume_removes_nothing(run: Run, start_server: Starter, tmp_path: Path) -> None:
    """A snapshot without a shard's problems must not displace those that have them."""
    servers = service(start_server, "shard", 2)
    folder = tmp_path / "backups"
    folder.mkdir()
    (folder / "2026-01-01T02-00-00Z.jsonl.gz").write_bytes(b"old")
    keep = ("snapshot", folder, "--keep", "1", "--from", listed(servers))
    write(servers[0].endpoint, writings(seed=20))
    code, said = run(*keep)
    assert "--keep: shard-1 exported no problem while other shards did" in said
    assert code == 1
    assert len(list(folder.iterdir())) == 2
    write(servers[1].endpoint, writings(seed=21))
    assert run(*keep)[0] == 0
    assert len(list(folder.iterdir())) == 1


def test_a_store_that_shards_share_is_read_once(
    run: Run, start_server: Starter, redis_server: RedisProcess, tmp_path: Path
) -> None:
    servers = [start_server("--store", redis_server.url) for _ in range(3)]
    written = writings(seed=22)
    write(listed(servers), written)
    file = tmp_path / "all.jsonl.gz"
    assert run("snapshot", file, "--from", listed(servers))[1].startswith(f"{file}: {len(written)} problems")
    fresh = service(start_server, "sqlite", 1)
    assert run("restore", file, "--to", listed(fresh))[0] == 0
    assert found(listed(fresh), written) == expected(written)


def test_what_the_drafter_learned_goes_to_every_shard(
    run: Run, start_server: Starter, tmp_path: Path, connect: Connector, data: Path
) -> None:
    """A state that cannot be used, like this one, is left out with a warning; test_import has one that can."""
    servers = service(start_server, "new", 2)
    file = tmp_path / "all.jsonl"
    run("snapshot", file, "--data-dir", data)
    assert run("restore", file, "--to", listed(servers))[0] == 0
    held: Counter[Problem] = Counter()
    for server in servers:
        eventually(partial(warned, server), "the state did not reach every shard")
        there = problems(export(connect(server.endpoint).stub))
        held.update({problem: len(records) for problem, records in there.items()})
    store = on_disk(tmp_path)
    assert held == {problem: len(records) for problem, records in content(store)[0].items()}
    store.close()


def warned(server: Server) -> bool:
    return any("estimator cannot be used" in str(entry["event"]) for entry in server.log)


def test_problems_go_where_clients_look_for_them(
    run: Run, start_server: Starter, tmp_path: Path, connect: Connector, data: Path
) -> None:
    servers = service(start_server, "new", 3)
    file = tmp_path / "all.jsonl"
    run("snapshot", file, "--data-dir", data)
    run("restore", file, "--to", listed(servers))
    names = [f"shard-{number}" for number in range(3)]
    for number, server in enumerate(servers):
        for problem in problems(export(connect(server.endpoint).stub)):
            assert placement.place(placement.problem_digest(*problem), names) == number


def test_a_large_problem_travels_in_parts(run: Run, start_server: Starter, tmp_path: Path, connect: Connector) -> None:
    """All equal responses are restored, and no message exceeds the server's limit."""
    store = on_disk(tmp_path, "large")
    rows = [np.arange(number, number + 20_000, dtype="<i4").tobytes() for number in (*range(40), *range(10))]
    for epoch in range(3):
        some = [batch(row, epoch).records[0] for row in rows]
        store.append(ResponseBatch(batch(b"1234").problem, some)).result()
    expected_records = content(store)[0]
    store.close()
    file = tmp_path / "all.jsonl.gz"
    run("snapshot", file, "--data-dir", tmp_path / "large")
    server = start_server("--max-message", "1MiB", "--max-batch", "16", name="new")
    assert "150 responses" in run("restore", file, "--to", server.endpoint)[1]
    (records,) = problems(export(connect(server.endpoint).stub)).values()
    ((_, all_of_it),) = expected_records.items()
    assert Counter(records) == Counter(all_of_it)
    assert [record.epoch for record in records] == sorted(record.epoch for record in records)
    assert "0 responses" in run("restore", file, "--to", server.endpoint, "--merge")[1]
    tight = start_server("--max-message", "64KiB", name="tight")
    code, said = run("restore", file, "--to", tight.endpoint)
    assert code == 1
    assert "bytes, more than the limit of 65536; start the server with a larger --max-message" in said


def test_a_shard_that_is_away_is_waited_for(start_server: Starter, tmp_path: Path, data: Path, run: Run) -> None:
    file = tmp_path / "all.jsonl"
    run("snapshot", file, "--data-dir", data)
    servers = service(start_server, "new", 2)
    servers[1].kill()
    with children.histospec("restore", file, "--to", listed(servers)) as child:
        child.wait_for("trying again for 60 s")
        servers[1].start()
        code, said = child.end()
    assert code == 0, said
    servers[0].kill()
    with children.histospec("snapshot", tmp_path / "back.jsonl", "--from", listed(servers)) as child:
        child.wait_for("trying again for 60 s")
        servers[0].start()
        code, said = child.end()
    assert code == 0, said
    assert "4 problems, 7 responses, 314 tokens" in said


def test_a_shard_that_stays_away_ends_it_and_leaves_nothing(
    run: Run, start_server: Starter, tmp_path: Path, data: Path, connect: Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "PATIENCE", 0.5)
    servers = service(start_server, "some", 2)
    servers[1].kill()
    file = tmp_path / "all.jsonl"
    code, said = run("snapshot", file, "--from", listed(servers))
    assert code == 1
    assert "Export on shard-1: " in said
    assert not list(tmp_path.glob("all*"))
    run("snapshot", file, "--data-dir", data)
    code, said = run("restore", file, "--to", listed(servers))
    assert code == 1
    assert "run again with --merge to add the rest" in said
    servers[1].start()
    assert run("restore", file, "--to", listed(servers), "--merge")[0] == 0
    there = [problems(export(connect(server.endpoint).stub)) for server in servers]
    store = on_disk(tmp_path)
    assert there[0] | there[1] == restorable(store)
    store.close()
    servers[1].kill()
    code, said = run("snapshot", file, "--from", listed(servers[:1]), "--shards", "2")
    assert code == 1
    assert "--shards is 2, but 1 are listed" in said
    code, said = run("snapshot", file, "--from", f"discover://{servers[0].endpoint}", "--shards", "2")
    assert code == 1
    assert f"--shards is 2, but 1 were found ({servers[0].endpoint}); wait until all shards are up" in said


def test_a_service_is_found_from_one_of_its_shards(run: Run, start_server: Starter, tmp_path: Path) -> None:
    first = start_server("--shard-name", "a")
    second = start_server("--shard-name", "b", "--peers", f"a={first.endpoint}")
    written = writings(seed=23)
    write(f"discover://{second.endpoint}", written)
    file = tmp_path / "all.jsonl.gz"
    assert run("snapshot", file, "--from", f"discover://{second.endpoint}", "--shards", "2")[0] == 0
    third = start_server("--shard-name", "c")
    assert run("restore", file, "--to", f"discover://{third.endpoint}")[0] == 0
    assert found(third.endpoint, written) == expected(written)


def test_a_snapshot_of_a_shard_that_dies_half_way_is_none(start_server: Starter, tmp_path: Path) -> None:
    large(tmp_path, "long")
    server = start_server(name="long")
    file = tmp_path / "all.jsonl.gz"
    with children.histospec("snapshot", file, "--from", server.endpoint) as child:
        eventually(lambda: any(path.stat().st_size > 10_000 for path in tmp_path.glob("all*.partial")))
        server.kill()
        code, said = child.end()
    assert code == 1
    assert f"Export on {server.endpoint}: " in said
    assert not list(tmp_path.glob("all*"))


def test_an_interrupted_snapshot_frees_its_shard(start_server: Starter, tmp_path: Path, connect: Connector) -> None:
    large(tmp_path, "long")
    server = start_server(name="long")
    file = tmp_path / "all.jsonl.gz"
    with children.histospec("snapshot", file, "--from", server.endpoint) as child:
        eventually(lambda: any(path.stat().st_size > 10_000 for path in tmp_path.glob("all*.partial")))
        child.send_signal(signal.SIGTERM)
        assert child.end() == (128 + signal.SIGTERM, "")
    assert not list(tmp_path.glob("all*"))
    eventually(lambda: any(entry["event"] == "an export ended early" for entry in server.log))


def test_an_older_server_is_named(run: Run, tmp_path: Path) -> None:
    odd = OddServer()
    code, said = run("snapshot", tmp_path / "all.jsonl", "--from", odd.endpoint)
    odd.stop()
    assert code == 1
    assert f"{odd.endpoint} does not know the method Export; upgrade the server" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("snapshot", "a.jsonl", "--from", "a:1", "--data-dir", "x"),
            "--data-dir: applies to a store that the command opens, but a:1 has its own",
        ),
        (
            ("snapshot", "a.jsonl", "--from", "a:1", "--store", "sqlite"),
            "--store: applies to a store that the command opens, but a:1 has its own",
        ),
        (("snapshot", "a.jsonl", "--shards", "2"), "--shards: needs a running service; name it with --from"),
        (("snapshot", "a.jsonl", "--token-file", "x"), "--token-file: needs a running service"),
        (("snapshot", "a.jsonl", "--from", "nonsense"), "'nonsense' is not of the form host:port or name=host:port"),
        (("snapshot", "a.jsonl", "--from", "a:1", "--token-file", "/none"), "cannot read /none: No such file"),
        (("snapshot", "a.jsonl", "--from", "a:1", "--shards", "0"), "--shards: must be at least 1"),
    ],
)
def test_nonsense_is_refused(run: Run, words: tuple[str, ...], said: str) -> None:
    code, text = run(*words)
    assert code == 2
    assert said in text


class Cut:
    """Shards of which one sends less than it announces, or omits the end."""

    names = ("cut",)

    def __init__(self, *messages: pb.ExportResponse) -> None:
        self._messages = messages

    def stream(self, name: str, request: pb.ExportRequest) -> tuple[object, pb.ExportStart]:
        return iter(self._messages), pb.ExportStart(shard=name)


@pytest.mark.parametrize("end", [None, pb.ExportEnd(problems=1, responses=2), pb.ExportEnd(problems=2, responses=1)])
def test_an_export_that_is_cut_short_is_not_taken_for_the_whole(end: pb.ExportEnd | None) -> None:
    problem = pb.StoredProblem(prompt=tokens(1), responses=[pb.Response(tokens=tokens(2))])
    sent = [pb.ExportResponse(namespace="run", problems=[problem])]
    sent += [pb.ExportResponse(end=end)] if end else []
    with pytest.raises(ShardsError, match="Export on cut: 1 responses arrived, fewer than the shard sent; try again"):
        list(Exported(Cut(*sent), "*"))  # type: ignore[arg-type]
    whole = pb.ExportResponse(end=pb.ExportEnd(problems=1, responses=1))
    assert len(list(Exported(Cut(sent[0], whole), "*"))) == 1  # type: ignore[arg-type]
