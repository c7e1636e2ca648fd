"""Three shards on one Redis Cluster, and workers that never stop: whatever a shard does, nobody waits or loses."""

import contextlib
import signal
import threading
import time

import pytest
from waiting import eventually

from histospec.client import DraftClient, Response
from histospec.client.config import Breaker, Limits, Timeouts
from histospec.client.routing import place, problem_digest

NAMES = ["shard-0", "shard-1", "shard-2"]
PROMPTS = [[7, 7, p] for p in range(24)]
DEADLINE = 0.25
PATIENT = 3.0
"""Within which a step comes back on a test machine that does several other things."""


def owner(prompt: list[int], names: list[str] = NAMES) -> int:
    digest = problem_digest("run", b"".join(token.to_bytes(4, "little") for token in prompt))
    return place(digest, names)


def text(prompt: list[int], number: int) -> list[int]:
    """What the policy writes: the same for every rollout of a prompt, and at last the rollout's own number."""
    return [1000 * prompt[2] + i for i in range(60)] + [10**6 + number]


@pytest.fixture
def shards(start_server, redis_cluster):
    return [start_server("--store", redis_cluster.url, "--shard-name", name, "--drain-seconds", "2") for name in NAMES]


@pytest.fixture
def connect_all(shards):
    """connect_all() -> DraftClient of all three."""
    with contextlib.ExitStack() as stack:

        def connect(deadline: float = DEADLINE) -> DraftClient:
            endpoint = ",".join(f"{name}={shard.endpoint}" for name, shard in zip(NAMES, shards, strict=True))
            client = DraftClient(
                endpoint,
                namespace="run",
                timeouts=Timeouts(step=deadline, silence=1.0, shutdown=20.0),
                breaker=Breaker(cooldown=0.05, cooldown_max=0.3),
                limits=Limits(commits=100_000),
            )
            return stack.enter_context(client)

        yield connect


class Worker(threading.Thread):
    """Rolls out every prompt again and again, four at a time, as a worker does: accepts what it would have written."""

    def __init__(self, client: DraftClient, number: int) -> None:
        super().__init__(daemon=True)
        self.client = client
        self.number = number
        self.finished = 0
        self.slowest = 0.0
        self.written: list[tuple[int, int]] = []  # prompt, number of the rollout
        self.stop = threading.Event()

    def run(self) -> None:
        number = 10_000 * self.number
        while not self.stop.is_set():
            chosen = [(number + i, PROMPTS[(number + i) % len(PROMPTS)]) for i in range(4)]
            number += 4
            texts = [text(prompt, n) for n, prompt in chosen]
            sessions = self.client.open([prompt for _, prompt in chosen])
            done, new = [0] * 4, [list[int]() for _ in texts]
            while any(d < len(t) for d, t in zip(done, texts, strict=True)):
                started = time.monotonic()
                drafts = self.client.step(sessions, new)
                self.slowest = max(self.slowest, time.monotonic() - started)
                for i, (draft, whole) in enumerate(zip(drafts, texts, strict=True)):
                    accepted = 0
                    for token in draft.tokens.tolist():
                        if done[i] + accepted >= len(whole) - 1 or whole[done[i] + accepted] != token:
                            break
                        accepted += 1
                    new[i] = whole[done[i] : done[i] + accepted + 1]
                    done[i] += len(new[i])
            self.client.step(sessions, new, max_tokens=0)
            self.client.close(sessions, epochs=0)
            self.written += [(n % len(PROMPTS), n) for n, _ in chosen]
            self.finished += 1


def kill(shard) -> None:
    shard.kill()
    shard.start()


def restart(shard) -> None:
    shard.terminate()
    assert shard.wait() == 0
    shard.start()


def cut_off(shard) -> None:
    shard.signal(signal.SIGSTOP)
    time.sleep(3)
    shard.signal(signal.SIGCONT)


@pytest.mark.parametrize("fault", [kill, restart, cut_off])
def test_a_shard_that_fails_costs_nothing_but_drafts(shards, connect_all, fault):
    """
    1. Four workers roll out 24 prompts of three shards.
    2. One shard is killed, or restarted, or hangs; the workers go on meanwhile.
    3. No step took longer than its deadline allows, every response that a worker finished is in the history, and the
       shard drafts again what was written before the fault.
    """
    workers = [Worker(connect_all(), number) for number in range(4)]
    for worker in workers:
        worker.start()
    eventually(lambda: all(w.finished > 12 for w in workers), "the workers do not get on")
    failing = owner(PROMPTS[0])
    fault(shards[failing])
    after = [w.finished for w in workers]
    eventually(lambda: all(w.finished > n + 6 for w, n in zip(workers, after, strict=True)), "the workers hang")
    watcher = connect_all(5.0)
    mine = [prompt for prompt in PROMPTS if owner(prompt) == failing]
    assert mine

    def drafts_again() -> bool:
        sessions = watcher.open(mine)
        watcher.step(sessions, [[]] * len(mine), max_tokens=0)
        drafts = watcher.step(sessions, [text(prompt, 0)[:5] for prompt in mine])
        watcher.close(sessions, commit=False)
        return all(len(d) and d.tokens[0] == text(p, 0)[5] for d, p in zip(drafts, mine, strict=True))

    eventually(drafts_again, "no drafts come back")
    for worker in workers:
        worker.stop.set()
        worker.join()
        worker.client.flush(20.0)
        stats = worker.client.stats()
        assert (stats.pending_commits, stats.dropped_commits) == (0, 0)
        assert stats.commits == len(worker.written)
        assert worker.slowest < PATIENT
        closing = time.monotonic()
        worker.client.shutdown()
        assert time.monotonic() - closing < 10  # a stream that was given up must not be waited for
    expected = {(p, n) for worker in workers for p, n in worker.written}
    kept = {(p, r.tokens[-1] - 10**6) for p, prompt in enumerate(PROMPTS) for r in watcher.history(prompt)}
    assert expected <= kept


def test_any_shard_takes_over_any_problem(start_server, redis_server):
    """What one shard was given another one drafts, without having been told."""
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


def test_the_first_new_response_brings_the_old_ones_back(start_server, redis_server):
    """A trainer ingests before any session opens: the shard must not take the new response for all there is."""
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


def test_a_shard_hears_of_newer_epochs_from_another(start_server, redis_server):
    """
    1. Two shards run, and the first one stores epoch 7: soon, what the second one gets without an epoch is of epoch 7.
    2. Both are rewound to 3: so is what they get from then on.
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
            return max(response.epoch for response in client.history([3]))

        eventually(lambda: newest(other) == 7, "the second shard does not hear of epoch 7")
        both.rewind(3)
        for _ in range(10):
            assert (newest(one), newest(other)) == (3, 3)
            time.sleep(0.5)


def test_drafting_goes_on_while_the_store_is_away(start_server, tmp_path):
    """Sessions draft from the index and from each other; what cannot be kept is refused, and never acknowledged."""
    from redis_processes import RedisProcess, require_redis

    require_redis()
    redis = RedisProcess(tmp_path / "own-redis")
    server = start_server("--store", redis.url, "--shard-name", "shard-0")
    whole = list(range(100, 140))
    with DraftClient(server.endpoint, namespace="run", deadline=5.0) as client:
        client.ingest([1], [Response(whole)], epoch=0)
        redis.kill()
        (known, strange) = client.open([[1], [2]])
        drafts = client.step([known, strange], [whole[:4], whole[:4]])
        assert drafts[0].tokens[:2].tolist() == [104, 105]
        with pytest.raises(Exception, match="store"):
            client.ingest([1], [Response(whole)], epoch=1)
        assert len(client.step([known], [whole[4:8]])[0])
        redis.start()
        client.ingest([1], [Response(whole)], epoch=2)
        assert [r.epoch for r in client.history([1])] == [0, 2]
    assert server.metrics()["histospec_store_errors_total"] >= 1
    redis.kill()


def test_a_fourth_shard_takes_a_quarter_of_the_problems_and_their_history(shards, start_server, redis_cluster):
    """
    1. Three shards have the history of 240 problems.
    2. Clients that know a fourth one place 25 % +- 3 points of 10,000 problems there, and move no other.
    3. Of the 240, those that stay are drafted with the first step; those that move are drafted as soon as their new
       shard has read them, which it began with the session.
    """
    problems = [[5, p // 16, p % 16] for p in range(240)]

    def endpoint(servers) -> str:
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
