"""Three shards on one Redis Cluster, and workers that never stop: whatever a shard does, no worker waits or loses."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterable

import pytest

from histospec.client import DraftClient, Response
from histospec.protocol.placement import place, problem_digest
from tests.support.redis_processes import RedisCluster, RedisProcess
from tests.support.rollouts import NAMES, PROMPTS, Load, connections, owner
from tests.support.servers import Server, Starter
from tests.support.waiting import eventually


@pytest.fixture
def shards(start_server: Starter, redis_cluster: RedisCluster) -> list[Server]:
    return [start_server("--store", redis_cluster.url, "--shard-name", name, "--drain-seconds", "2") for name in NAMES]


def kill(shard: Server, load: Load) -> None:
    shard.kill()
    load.goes_on()
    shard.start()


def restart(shard: Server, load: Load) -> None:
    shard.drain()
    shard.start()


def stop_answering(shard: Server, load: Load) -> None:
    shard.signal(signal.SIGSTOP)
    load.goes_on()
    shard.signal(signal.SIGCONT)


@pytest.mark.parametrize("fault", [kill, restart, stop_answering])
def test_a_shard_that_fails_costs_nothing_but_drafts(
    shards: list[Server], fault: Callable[[Server, Load], None]
) -> None:
    """
    1. Four workers roll out 24 prompts of three shards.
    2. One shard is killed, or restarts, or hangs; the workers continue meanwhile.
    3. No step takes longer than its deadline allows, the history has every finished response, and the shard again
       drafts what was written before the fault.
    """
    with connections([shard.endpoint for shard in shards]) as connect:
        load = Load(connect)
        failing = owner(PROMPTS[0])
        fault(shards[failing], load)
        load.goes_on()
        load.drafts_of(failing)
        load.finish()


def test_any_shard_takes_over_any_problem(start_server: Starter, redis_server: RedisProcess) -> None:
    """One shard drafts what another one was given, without having been told."""
    first, second = (start_server("--store", redis_server.url, "--shard-name", name) for name in NAMES[:2])
    with DraftClient(first.endpoint, namespace="run", deadline=5.0) as client:
        client.ingest([1, 2], [Response(list(range(50, 90)), reward=0.5)], epoch=3)
        client.ingest([1, 2], [Response(list(range(50, 80)))], epoch=4)
    first.kill()
    with DraftClient(second.endpoint, namespace="run", deadline=5.0) as client:
        assert [(r.epoch, r.reward, len(r.tokens)) for r in client.history([1, 2])] == [(3, 0.5, 40), (4, None, 30)]
        (session,) = client.open([[1, 2]])
        eventually(lambda: len(client.step([session], [[]])[0]) > 0, "the second shard does not read the history")
        assert client.step([session], [[50, 51]])[0].tokens[:3].tolist() == [52, 53, 54]
        lengths = client.predict_length([1, 2])
        assert lengths.observations == 2  # each response once
    assert second.metrics()['histospec_store_lookups_total{result="hit"}'] == 1


def test_the_first_new_response_brings_the_old_ones_back(start_server: Starter, redis_server: RedisProcess) -> None:
    """A trainer ingests before any session opens: the shard must not take the new response for the whole history."""
    server = start_server("--store", redis_server.url, "--shard-name", "shard-0")
    with DraftClient(server.endpoint, namespace="run", deadline=5.0) as client:
        client.ingest([1], [Response([2, 3, 4]), Response([2, 3, 5])], epoch=0)
    server.restart()
    with DraftClient(server.endpoint, namespace="run", deadline=5.0) as client:
        client.ingest([1], [Response([2, 3, 6])], epoch=1)
        assert client.predict_length([1]).observations == 3
        assert len(client.history([1])) == 3
        assert client.drop_namespace() == 3
        assert client.history([1]) == []
        assert client.predict_length([1]).observations == 0


def test_a_shard_hears_of_newer_epochs_from_another(start_server: Starter, redis_server: RedisProcess) -> None:
    """
    1. Two shards run, and the first one stores epoch 7: soon, responses without an epoch get epoch 7 on the second one.
    2. Both are rewound to 3: from then on, so are responses without an epoch.
    """
    first, second = (start_server("--store", redis_server.url, "--shard-name", name) for name in NAMES[:2])
    with contextlib.ExitStack() as stack:
        one, other, both = (
            stack.enter_context(DraftClient(endpoint, namespace="run", deadline=5.0))
            for endpoint in (first.endpoint, second.endpoint, f"a={first.endpoint},b={second.endpoint}")
        )
        one.ingest([1], [Response([2])], epoch=7)

        def newest(client: DraftClient) -> int:
            client.ingest([3], [Response([4])])
            return max(response.epoch or 0 for response in client.history([3]))

        eventually(lambda: newest(other) == 7, "the second shard does not hear of epoch 7")
        both.rewind(3)
        for _ in range(10):
            assert (newest(one), newest(other)) == (3, 3)
            time.sleep(0.5)  # several of the intervals at which shards check the store


def test_drafting_goes_on_while_the_store_is_away(start_server: Starter, own_redis: RedisProcess) -> None:
    """Sessions draft from the index and from each other; the shard refuses what it cannot keep."""
    server = start_server("--store", own_redis.url, "--shard-name", "shard-0")
    whole = list(range(100, 140))
    with DraftClient(server.endpoint, namespace="run", deadline=5.0) as client:
        client.ingest([1], [Response(whole)], epoch=0)
        own_redis.kill()
        (known, strange) = client.open([[1], [2]])
        drafts = client.step([known, strange], [whole[:4], whole[:4]])
        assert drafts[0].tokens[:2].tolist() == [104, 105]
        with pytest.raises(Exception, match="store"):
            client.ingest([1], [Response(whole)], epoch=1)
        assert len(client.step([known], [whole[4:8]])[0])
        own_redis.start()
        client.ingest([1], [Response(whole)], epoch=2)
        assert [r.epoch for r in client.history([1])] == [0, 2]
    assert server.metrics()["histospec_store_errors_total"] >= 1


def test_a_fourth_shard_takes_a_quarter_of_the_problems_and_their_history(
    shards: list[Server], start_server: Starter, redis_cluster: RedisCluster
) -> None:
    """
    1. Three shards have the history of 240 problems.
    2. Clients that know a fourth one assign 25 % +- 3 points of 10,000 problems to it, and move no other.
    3. Of the 240, those that stay get drafts with the first step; those that move get drafts as soon as their new shard
       has read them, which starts with the session.
    """
    problems = [[5, p // 16, p % 16] for p in range(240)]

    def endpoint(servers: Iterable[Server]) -> str:
        return ",".join(f"shard-{i}={server.endpoint}" for i, server in enumerate(servers))

    with DraftClient(endpoint(shards), namespace="run", deadline=5.0) as client:
        for prompt in problems:
            client.ingest(prompt, [Response([1000 + 31 * prompt[1] + prompt[2] + 7 * i for i in range(20)])], epoch=0)
    names = [*NAMES, "shard-3"]
    digests = [problem_digest("run", number.to_bytes(4, "little")) for number in range(10_000)]
    moved = [place(d, names) for d in digests if place(d, names) != place(d, NAMES)]
    assert set(moved) == {3}
    assert abs(len(moved) / len(digests) - 0.25) < 0.03

    fourth = start_server("--store", redis_cluster.url, "--shard-name", "shard-3")
    with DraftClient(endpoint([*shards, fourth]), namespace="run", deadline=5.0) as client:
        sessions = client.open(problems)
        first = [[1000 + 31 * prompt[1] + prompt[2] + 7 * i for i in range(3)] for prompt in problems]
        drafts = client.step(sessions, first)
        mine = [p for p, prompt in enumerate(problems) if owner(prompt, names) == 3]
        stayed = [bool(len(draft)) for p, draft in enumerate(drafts) if p not in mine]
        assert all(stayed)
        assert abs(len(mine) / len(problems) - 0.25) < 0.1
        eventually(
            lambda: all(len(d) for d in client.step([sessions[p] for p in mine], [[]] * len(mine))),
            "the fourth shard does not read its problems",
        )
    assert fourth.metrics()['histospec_store_lookups_total{result="hit"}'] == len(mine)
    assert [shard.metrics()['histospec_store_lookups_total{result="hit"}'] for shard in shards] == [0, 0, 0]
