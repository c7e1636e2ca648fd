"""The Redis store under failures: servers that die, pause, fail over or are full, and lost answers."""

import threading
from collections.abc import Sequence, Sized
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import redis
import trustme
from hypothesis import given
from hypothesis import strategies as st

from histospec.server.errors import Damaged, LimitExceeded, StoreError, StoreFull
from histospec.server.stores import records
from histospec.server.stores.interface import Problem, Record
from histospec.server.stores.redis import keys as redis_keys
from histospec.server.stores.redis import reader as redis_reader
from histospec.server.stores.redis.location import Location
from histospec.server.stores.redis.servers import Command, Servers, comes_back
from histospec.server.stores.redis.store import RedisStore
from tests.server.stores.conftest import OpenRedis
from tests.support.batches import batch, put
from tests.support.ports import free_port
from tests.support.redis_processes import RedisCluster, RedisProcess, require_redis
from tests.support.waiting import Latch, eventually

PROBLEM = Problem("run", b"prompt..")


def test_a_server_over_tls_is_checked_and_wants_a_password(tmp_path: Path, open_redis: OpenRedis) -> None:
    """
    1. A server with only TLS accepts and returns responses, with its password and its authority.
    2. Without that authority, or with a wrong password, the store sends nothing; no message shows the password.
    """
    require_redis()
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    issued.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
    files = ["--tls-cert-file", "server.pem", "--tls-key-file", "server.pem", "--tls-auth-clients", "no"]
    port = free_port()
    options = ["--tls-port", str(port), *files, "--requirepass", "se/cret"]
    (tmp_path / "redis").mkdir()
    (tmp_path / "server.pem").rename(tmp_path / "redis" / "server.pem")
    server = RedisProcess(tmp_path / "redis", *options, password="se/cret")
    try:
        where = f"127.0.0.1:{port}"
        store = open_redis(f"rediss://:se%2Fcret@{where}?ca={tmp_path / 'ca.pem'}")
        put(store, b"12345678")
        assert len(store.history(PROBLEM)) == 1
        for url in (f"rediss://:se%2Fcret@{where}", f"rediss://:wrong@{where}?ca={tmp_path / 'ca.pem'}"):
            with pytest.raises(StoreError) as caught:
                open_redis(url).history(PROBLEM)
            assert "cret" not in str(caught.value)
            assert "wrong" not in str(caught.value)
    finally:
        server.kill()


def test_a_read_takes_pages_of_bounded_bytes(
    server: RedisProcess, open_redis: OpenRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest come first, one that alone has more is a page of its own, and a limit ends the reading."""
    store = open_redis(server.url)
    sizes = [40, 400, 400, 4000, 40, 400, 40, 40]
    for number, size in enumerate(sizes):
        put(store, bytes([number]) * size)
    everything = store.history(PROBLEM)
    assert [len(record.tokens) for record in everything] == sizes
    monkeypatch.setattr(redis_reader, "PAGE_BYTES", 1000)
    pages = list(store.pages(PROBLEM))
    assert [[len(record.tokens) for record in page] for page in pages] == [[40, 400, 40, 40], [4000], [40, 400, 400]]
    assert store.history(PROBLEM) == everything
    assert store.history(PROBLEM, 3) == everything[-3:]
    read: list[Command] = []

    def tried(commands: Sequence[Command]) -> list[Any]:
        read.extend(commands)
        return store._servers.each(commands)

    monkeypatch.setattr(store, "_tried", tried)
    with pytest.raises(LimitExceeded, match="4520 bytes, more than the limit of 4000"):
        store.history(PROBLEM, max_bytes=4000)
    assert [command[0] for command in read].count("EVAL") == 2


@given(
    st.lists(st.integers(0, 2**31 - 1), max_size=40),
    st.integers(0, 2**62),
    st.none() | st.floats(allow_nan=False),
    st.booleans(),
    st.booleans(),
    st.none() | st.integers(-(2**63), 2**63 - 1),
    st.binary(max_size=20),
)
def test_a_packed_record_comes_back(
    tokens: list[int], epoch: int, reward: float | None, scored: bool, masked: bool, seed: int | None, others: bytes
) -> None:
    size = len(tokens)
    logprobs = np.arange(size, dtype="<f4").tobytes() if scored else b""
    mask = bytes(i % 2 for i in range(size)) if masked else b""
    record = Record(np.array(tokens, "<i4").tobytes(), epoch, reward, logprobs, mask, seed, others)
    assert records.unpack(records.pack(record)) == record


def test_a_record_of_another_version_is_refused_by_its_number() -> None:
    packed = records.pack(Record(b"1234", 0, seed=-1))
    with pytest.raises(Damaged, match="a response has version 2, this server needs 1; take a snapshot"):
        records.unpack(b"\2" + packed[1:])


@given(st.data())
def test_every_flipped_bit_of_a_record_is_found(data: st.DataObject) -> None:
    seed = data.draw(st.none() | st.integers(-(2**63), 2**63 - 1))
    packed = bytearray(records.pack(Record(bytes(range(40)), 3, 0.5, bytes(40), b"\1\0" * 5, seed, b"others")))
    bit = data.draw(st.integers(0, 8 * len(packed) - 1))
    packed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Damaged):
        records.unpack(bytes(packed))


def test_a_damaged_response_is_left_out_and_counted_once(server: RedisProcess, open_redis: OpenRedis) -> None:
    store = open_redis(server.url)
    for text in (b"aaaa", b"bbbb", b"cccc"):
        put(store, text)
    key = redis_keys.problem_key(redis_keys.digest_of(PROBLEM))
    name = sorted(name for name in server.client.hkeys(key) if name != redis_keys.ABOUT)[1]
    packed = bytearray(cast(bytes, server.client.hget(key, name)))
    packed[30] ^= 1
    server.client.hset(key, name, bytes(packed))
    server.client.hset(key, redis_keys.FIELD.pack(b"r", 0, 0, b"damage"), b"\1rubbish")
    for _ in range(2):
        assert [r.tokens for r in store.history(PROBLEM)] == [b"aaaa", b"cccc"]
    assert [len(found) for _, found in store.problems("run")] == [2]
    assert store.damaged_responses == 2


@given(st.binary(max_size=80))
def test_bytes_that_are_no_record_are_refused(data: bytes) -> None:
    try:
        record = records.unpack(data)
    except StoreError:
        return
    assert records.unpack(records.pack(record)) == record or record.reward != record.reward


@pytest.mark.parametrize(("largest", "width"), [(1000, 2), (150_000, 3), (2**31 - 1, 4)])
def test_tokens_take_as_many_bytes_as_the_largest_needs(largest: int, width: int) -> None:
    record = Record(np.full(1000, largest, "<i4").tobytes(), 0)
    assert len(records.pack(record)) == pytest.approx(1000 * width, abs=32)


def test_two_problems_of_one_digest_are_not_mixed(
    open_redis: OpenRedis, redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_keys, "problem_digest", lambda *_: b"the same 16 byte")
    store = open_redis(redis_server.url)
    store.append(batch(b"mine")).result()
    assert store.history(Problem("run", b"another.")) == []
    with pytest.raises(StoreError, match="another problem has the same digest"):
        open_redis(redis_server.url).append(batch(b"your", prompt=b"another.")).result()
    assert [r.tokens for r in store.history(PROBLEM)] == [b"mine"]


def _longer(acknowledged: Sized, than: int) -> bool:
    return len(acknowledged) > than


def test_a_write_whose_answer_is_lost_is_written_once(open_redis: OpenRedis, redis_server: RedisProcess) -> None:
    lost: list[Any] = []

    class Losing(Servers):
        def each(self, commands: Sequence[Command], replicas: bool = False) -> list[Any]:
            answers = super().each(commands, replicas)
            if len(lost) < 3:
                lost.append(commands)
                return [redis.ConnectionError("the answer is lost")] * len(commands)
            return answers

    store = open_redis(redis_server.url, Losing)
    store.append(batch(b"once")).result()
    assert len(lost) == 3
    assert [r.tokens for r in store.history(PROBLEM)] == [b"once"]


class Trying(Servers):
    """Counts the requests that failed."""

    failed = 0

    def each(self, commands: Sequence[Command], replicas: bool = False) -> list[Any]:
        answers = super().each(commands, replicas)
        self.failed += any(isinstance(answer, redis.RedisError) for answer in answers)
        return answers


def test_a_server_that_restarts_is_waited_for(open_redis: OpenRedis, server: RedisProcess) -> None:
    servers = Trying(lambda: Location.parse(server.url))
    store = open_redis(server.url, lambda _: servers)
    store.append(batch(b"aaaa")).result()
    server.kill()
    waiting = store.append(batch(b"bbbb"))
    eventually(lambda: servers.failed, "the store does not write")
    server.start()
    waiting.result()
    assert [r.tokens for r in store.history(PROBLEM)] == [b"aaaa", b"bbbb"]


def test_a_server_that_stays_away_costs_the_callers_only_an_error(open_redis: OpenRedis, server: RedisProcess) -> None:
    servers = Trying(lambda: Location.parse(server.url))
    store = open_redis(server.url, lambda _: servers, patience=0.5)
    server.kill()
    with pytest.raises(StoreError, match="the request is refused"):
        store.append(batch(b"aaaa")).result()
    with pytest.raises(StoreError):
        store.history(PROBLEM)
    before = servers.failed
    with pytest.raises(StoreError):
        store.append(batch(b"bbbb")).result()
    assert servers.failed == before + 1  # it is not waited for again
    server.start()
    eventually(lambda: _succeeds(store, b"cccc"), "the store does not come back")
    assert b"cccc" in [r.tokens for r in store.history(PROBLEM)]


def _succeeds(store: RedisStore, tokens: bytes) -> bool:
    try:
        store.append(batch(tokens)).result()
    except StoreError:
        return False
    return True


def test_a_server_that_hangs_is_given_up(open_redis: OpenRedis, server: RedisProcess) -> None:
    store = open_redis(server.url, partial(Servers, answer_seconds=0.3), patience=0.5)
    store.append(batch(b"aaaa")).result()
    server.pause()
    with pytest.raises(StoreError, match=r"[Tt]imeout"):
        store.append(batch(b"bbbb")).result()
    server.go_on()
    eventually(lambda: _succeeds(store, b"cccc"), "the store does not come back")


def test_a_full_server_is_told_from_a_broken_one(open_redis: OpenRedis, server: RedisProcess) -> None:
    store = open_redis(server.url)
    store.append(batch(b"aaaa")).result()
    server.client.config_set("maxmemory", "1")
    with pytest.raises(StoreFull, match="full"):
        store.append(batch(b"bbbb")).result()
    server.client.config_set("maxmemory", "0")
    store.append(batch(b"cccc")).result()
    assert [r.tokens for r in store.history(PROBLEM)] == [b"aaaa", b"cccc"]


def test_problems_that_redis_forgot_leave_their_list(open_redis: OpenRedis, redis_server: RedisProcess) -> None:
    store = open_redis(redis_server.url)
    for number in range(20):
        store.append(batch(b"aaaa", prompt=bytes([number] * 4))).result()

    def listed() -> int:
        return sum(redis_server.client.scard(key) for key in redis_server.client.keys("histospec:1:problems:*"))

    keys = redis_server.client.keys("histospec:1:problem:*")
    redis_server.client.delete(*keys[:5])
    assert store.count() == 15
    assert listed() == 15
    redis_server.client.delete(*keys[5:10])
    store.rewind("run", 0).result()
    assert (store.count(), listed()) == (10, 10)


def test_writes_do_not_wait_while_a_drop_looks_for_unlisted_problems(
    open_redis: OpenRedis, redis_server: RedisProcess
) -> None:
    """Drops that wait meanwhile share the next look."""
    store = open_redis(redis_server.url)
    put(store, b"gone", namespace="a")
    complete, looks, begun, may = store._lists.complete, [], Latch(), Latch()

    def look() -> None:
        looks.append(1)
        begun.set()
        may.wait()
        complete()

    store._lists.complete = look  # type: ignore[method-assign]
    drops = [store.drop("a")]
    begun.wait()
    drops += [store.rewind("b", 1), store.drop("c"), store.drop("a")]
    try:
        put(store, b"kept", namespace="b")
        assert not any(drop.done() for drop in drops)
    finally:
        may.set()
    assert [drop.result() for drop in drops] == [1, 0, 0, 0]
    assert len(looks) == 2
    assert store.count() == 1


def test_closing_finishes_the_drops_that_wait(open_redis: OpenRedis, redis_server: RedisProcess) -> None:
    store = open_redis(redis_server.url)
    put(store, b"gone", namespace="a")
    drops = [store.drop("a"), store.drop("b")]
    store.close()
    assert [drop.result(0) for drop in drops] == [1, 0]


def test_a_problem_that_comes_back_while_its_list_is_tidied_stays_listed(
    open_redis: OpenRedis, redis_server: RedisProcess
) -> None:
    store = open_redis(redis_server.url, retention=60.0)
    store.append(batch(b"aaaa")).result()
    redis_server.client.delete(*redis_server.client.keys("histospec:1:problem:*"))

    class Meanwhile(Servers):
        def each(self, commands: Sequence[Command], replicas: bool = False) -> list[Any]:
            if commands[0][0] == "SREM":
                store.append(batch(b"bbbb")).result()
            return super().each(commands, replicas)

    assert open_redis(redis_server.url, Meanwhile, retention=60.0).count() == 0
    assert [(p, [r.tokens for r in some]) for p, some in store.problems("run")] == [(PROBLEM, [b"bbbb"])]


def test_a_replica_that_is_not_there_is_not_taken_for_one(open_redis: OpenRedis, server: RedisProcess) -> None:
    store = open_redis(f"{server.url}?replicas=1", partial(Servers, replica_seconds=0.1), patience=0.2)
    with pytest.raises(StoreError, match="0 replicas have the write, 1 are required"):
        store.append(batch(b"aaaa")).result()


def test_a_master_that_became_a_replica_is_left(tmp_path: Path, server: RedisProcess) -> None:
    """Every command fails with an error after which it is tried again, on a new connection."""
    other = RedisProcess(tmp_path / "other")
    servers = Servers(lambda: Location.parse(f"{server.url}?replicas=1"), replica_seconds=0.1)
    try:
        assert isinstance(servers.each([("SET", "a", "1")], replicas=True)[0], redis.ConnectionError)
        connections = server.client.info("stats")["total_connections_received"]
        host, port = other.where.rsplit(":", 1)
        server.client.replicaof(host, port)
        for _ in range(2):
            for error in servers.each([("SET", "a", "1"), ("GET", "a")], replicas=True):
                assert comes_back(error, url_may_change=False), error
        assert server.client.info("stats")["total_connections_received"] >= connections + 2
    finally:
        servers.close()
        other.kill()


def test_new_connections_do_not_close_those_in_use(redis_cluster: RedisCluster) -> None:
    """A thread that finds a server gone connects again; another one waits for its answer meanwhile."""
    servers = Servers(lambda: Location.parse(redis_cluster.url))
    servers.run([("SET", "a", "1")])
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.extend(servers.each([("BLPOP", "nothing", 0.5)])))
    waiting.start()
    eventually(lambda: sum(node.client.info("clients")["blocked_clients"] for node in redis_cluster.nodes))
    servers.close()
    waiting.join()
    assert answers == [None], "its connection was closed"
    assert servers.each([("GET", "a")]) == [b"1"]
    servers.close()


def test_what_was_acknowledged_survives_the_masters(open_redis: OpenRedis, tmp_path: Path) -> None:
    """Three masters with a replica each, constant writes, and kill -9 for one master after another."""
    require_redis()
    cluster = RedisCluster(tmp_path, replicas=1)
    store = open_redis(f"{cluster.url}?replicas=1")
    acknowledged, failed, stop = [], [], threading.Event()

    def append() -> None:
        number = 0
        while not stop.is_set():
            prompt, tokens = (number % 97).to_bytes(4, "little"), number.to_bytes(4, "little")
            try:
                store.append(batch(tokens, prompt=prompt)).result()
                acknowledged.append((prompt, tokens))
            except StoreError:
                failed.append(tokens)
            number += 1

    writer = threading.Thread(target=append)
    writer.start()
    try:
        for node in cluster.masters()[:2]:
            eventually(partial(_longer, acknowledged, len(acknowledged) + 100), "nothing is written")
            node.kill()
            eventually(lambda: len(cluster.masters()) == 3, "no replica takes over", no=redis.RedisError)
            node.start()  # without a replica, the new master can confirm no write
            eventually(partial(_longer, acknowledged, len(acknowledged) + 100), "writing does not go on")
            eventually(
                lambda: all(m.client.info("replication")["connected_slaves"] for m in cluster.masters()),
                "no replicas",
                no=redis.RedisError,
            )
    finally:
        stop.set()
        writer.join()
    kept = {p: {r.tokens for r in store.history(Problem("run", p))} for p in {p for p, _ in acknowledged}}
    missing = [tokens for prompt, tokens in acknowledged if tokens not in kept[prompt]]
    assert not missing
    cluster.kill()


def test_where_a_url_leads() -> None:
    location = Location.parse("rediss+cluster://me:se%2Fcret@a:1,[::1]:2,c?replicas=2&ca=/ca.pem")
    assert location.nodes == (("a", 1), ("::1", 2), ("c", 6379))
    assert (location.username, location.password, location.replicas, location.ca) == ("me", "se/cret", 2, "/ca.pem")
    assert location.cluster
    assert location.tls
    assert "se" not in str(location).replace("redis", "")
    assert Location.parse("redis://host/3").database == 3
