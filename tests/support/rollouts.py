"""Rollouts of prompts whose texts are known, and workers that repeat them on three shards without end."""

import asyncio
import contextlib
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence

from histospec.client import DraftClient
from histospec.client.config import Breaker, Limits, Timeouts
from histospec.protocol.placement import place, problem_digest
from tests.support.clients import texts
from tests.support.waiting import eventually

NAMES = ["shard-0", "shard-1", "shard-2"]
NAMESPACE = "run"
PROMPTS = [[7, 7, p] for p in range(24)]
TEXT = list(range(100, 160))
WORKERS = 4
DEADLINE = 0.25
PATIENT = 3.0
"""Seconds within which a step returns on a busy machine; on a slow one, 100 times the median of its steps."""
SHUTDOWN = 20.0

Connect = Callable[..., DraftClient]


def owner(prompt: list[int], names: list[str] = NAMES) -> int:
    """The shard that a prompt belongs to."""
    digest = problem_digest(NAMESPACE, b"".join(token.to_bytes(4, "little") for token in prompt))
    return place(digest, names)


def text(prompt: list[int], number: int) -> list[int]:
    """What the policy writes: the same for every rollout of a prompt, and at last the rollout's own number."""
    return [1000 * prompt[2] + i for i in range(60)] + [10**6 + number]


@contextlib.contextmanager
def connections(endpoints: Sequence[str]) -> Iterator[Connect]:
    """`connect(deadline=0.25)` -> a DraftClient of the three shards, which ends with the block."""
    with contextlib.ExitStack() as stack:

        def connect(deadline: float = DEADLINE) -> DraftClient:
            client = DraftClient(
                ",".join(f"{name}={endpoint}" for name, endpoint in zip(NAMES, endpoints, strict=True)),
                namespace=NAMESPACE,
                timeouts=Timeouts(step=deadline, silence=1.0, shutdown=SHUTDOWN),
                breaker=Breaker(cooldown=0.05, cooldown_max=0.3),
                limits=Limits(commits=100_000),
            )
            return stack.enter_context(client)

        yield connect


def roll_out(
    client: DraftClient,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[list[int]],
    epoch: int,
    seeds: Sequence[int] | None = None,
) -> Iterator[None]:
    """Sessions of the prompts write these texts, and accept of each draft what their text goes on with.

    Yields after every step. A session that has written its text is closed and committed.
    """
    sessions = client.open(prompts, seeds=seeds)
    new = dict(enumerate(text[:1] for text in texts))
    written = [1] * len(texts)
    while new:
        running = [i for i in new if written[i] < len(texts[i])]
        ended = [i for i in new if i not in running]
        drafts = client.step([sessions[i] for i in running], [new[i] for i in running])
        if ended:
            client.step([sessions[i] for i in ended], [new[i] for i in ended], max_tokens=0)
            client.close([sessions[i] for i in ended], epochs=epoch)
        yield
        new = {i: verified(d.tokens.tolist(), texts[i][written[i] :]) for i, d in zip(running, drafts, strict=True)}
        for i, tokens in new.items():
            written[i] += len(tokens)


def verified(draft: Iterable[int], rest: list[int]) -> list[int]:
    """What a step writes: the draft as far as the policy would have written it, and one token of the policy's own."""
    accepted = 0
    for token in draft:
        if accepted >= len(rest) - 1 or rest[accepted] != token:
            break
        accepted += 1
    return rest[: accepted + 1]


def shut_down(client: DraftClient) -> None:
    """Ends the client. If it waits for a stream that was given up, fails with what it waits for."""
    ending = threading.Thread(target=client.shutdown, daemon=True)
    ending.start()
    ending.join(SHUTDOWN / 2)
    if ending.is_alive():
        assert ending.ident is not None
        where = traceback.format_stack(sys._current_frames()[ending.ident])
        loop = client._streams.loop
        waiting = asyncio.all_tasks(loop) if loop else ()
        streams = [(shard.name, shard.stream and vars(shard.stream)) for shard in client._core.shards]
        raise AssertionError("\n".join(["a stream is waited for", *where, *map(repr, waiting), *map(repr, streams)]))


class Worker(threading.Thread):
    """Rolls out every prompt again and again, four at a time."""

    def __init__(self, client: DraftClient, number: int) -> None:
        super().__init__(daemon=True)
        self.client = client
        self.number = number
        self.finished = 0
        self.steps: list[float] = []
        """Seconds of each step."""
        self.prompts: dict[int, list[int]] = {}
        """Of the finished rollouts, by their numbers."""
        self.stop = threading.Event()

    def run(self) -> None:
        number = 100_000 * self.number
        while not self.stop.is_set():
            chosen = {number + i: PROMPTS[(number + i) % len(PROMPTS)] for i in range(4)}
            number += 4
            policy = [text(prompt, n) for n, prompt in chosen.items()]
            started = time.monotonic()
            for _ in roll_out(self.client, list(chosen.values()), policy, epoch=0):
                self.steps.append(time.monotonic() - started)
                started = time.monotonic()
            self.prompts |= chosen
            self.finished += 1

    def acknowledged(self) -> bool:
        """Whether the shards have all that was committed, after up to 20 s."""
        self.client.flush(20.0)
        return not self.client.stats().pending_commits


class Drafted(threading.Thread):
    """Rolls out one prompt again and again: TEXT and the rollout's number. Counts the steps without right drafts.

    They count from the first right draft on. commits: how many rollouts it commits. epochs: whether each is an epoch.
    """

    def __init__(self, client: DraftClient, commits: int = 1 << 30, epochs: bool = True) -> None:
        super().__init__(daemon=True)
        self.rollouts = self.undrafted = 0
        self._client, self._commits, self._epochs = client, commits, epochs
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        drafted = False
        while not self._over.is_set():
            (session,) = self._client.open([[1, 2, 3]])
            for at in range(0, 60, 5):
                (draft,) = self._client.step([session], [TEXT[at : at + 5]])
                right = draft.tokens[:3].tolist() == TEXT[at + 5 : at + 8]
                drafted = drafted or right
                self.undrafted += drafted and at < 50 and not right
            self._client.step([session], [[self.rollouts]], max_tokens=0)
            epoch = self.rollouts if self._epochs else 0
            self._client.close([session], commit=self.rollouts < self._commits, epochs=epoch)
            self.rollouts += 1

    def goes_on(self, rollouts: int = 10) -> None:
        until = self.rollouts + rollouts
        eventually(lambda: self.rollouts >= until, "the worker does not get on")

    def stop(self) -> None:
        """Ends it; returns when its commits are acknowledged, or after 20 s."""
        self._over.set()
        self.join()
        self._client.flush(20.0)


class Load:
    """Four workers at work, and a client beside them that looks."""

    def __init__(self, connect: Connect) -> None:
        self.watcher = connect(5.0)
        self.workers = [Worker(connect(), number) for number in range(WORKERS)]
        for worker in self.workers:
            worker.start()
        self.goes_on(12)

    def goes_on(self, rollouts: int = 6) -> None:
        """Waits until each worker has finished so many more batches."""
        before = [w.finished for w in self.workers]
        eventually(
            lambda: all(w.finished >= n + rollouts for w, n in zip(self.workers, before, strict=True)),
            "the workers do not get on",
        )

    def pending(self) -> int:
        """Returns how many finished responses the shards have not acknowledged yet."""
        return sum(worker.client.stats().pending_commits for worker in self.workers)

    def drafts_of(self, shard: int) -> None:
        """Waits until the shard drafts what was written of each of its problems."""
        mine = [prompt for prompt in PROMPTS if owner(prompt) == shard]
        assert mine

        def drafted() -> bool:
            sessions = self.watcher.open(mine)
            self.watcher.step(sessions, [[]] * len(mine), max_tokens=0)
            drafts = self.watcher.step(sessions, [text(prompt, 0)[:5] for prompt in mine])
            self.watcher.close(sessions, commit=False)
            return all(len(d) and d.tokens[0] == text(p, 0)[5] for d, p in zip(drafts, mine, strict=True))

        eventually(drafted, f"no drafts of {NAMES[shard]}")

    def stop(self) -> None:
        """No new rollouts."""
        for worker in self.workers:
            worker.stop.set()
        for worker in self.workers:
            worker.join()

    def finish(self) -> None:
        """Stops, and checks: no step waited, and the history has all that was written, and nothing else."""
        self.stop()
        written: dict[int, list[int]] = {}
        for worker in self.workers:
            eventually(worker.acknowledged)
            stats = worker.client.stats()
            assert (stats.commits, stats.dropped_commits) == (len(worker.prompts), 0)
            assert max(worker.steps) < max(PATIENT, 100 * statistics.median(worker.steps))
            written |= {number: text(prompt, number) for number, prompt in worker.prompts.items()}
            shut_down(worker.client)
        kept = [tokens for prompt in PROMPTS for tokens in texts(self.watcher.history(prompt))]
        assert all(tokens == written[tokens[-1] - 10**6] for tokens in kept)
        assert {tokens[-1] - 10**6 for tokens in kept} == written.keys()
