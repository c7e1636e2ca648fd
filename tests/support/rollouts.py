"""Workers that generate rollouts of the same prompts on three shards without end, and checks of their results."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from histospec.client import DraftClient
from histospec.client.config import Breaker, Limits, Timeouts
from histospec.protocol.placement import place, problem_digest
from tests.support.clients import texts
from tests.support.waiting import eventually

NAMES = ["shard-0", "shard-1", "shard-2"]
NAMESPACE = "run"
PROMPTS = [[7, 7, p] for p in range(24)]
WORKERS = 4
DEADLINE = 0.25
PATIENT = 3.0
"""Within which a step comes back on a test machine that does several other things."""

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
        self.written: dict[int, tuple[list[int], list[int]]] = {}
        """By the number of the rollout: its prompt and its text."""
        self.stop = threading.Event()

    def run(self) -> None:
        number = 100_000 * self.number
        while not self.stop.is_set():
            chosen = {number + i: PROMPTS[(number + i) % len(PROMPTS)] for i in range(4)}
            number += 4
            for n, written in zip(chosen, self._roll_out(chosen), strict=True):
                self.written[n] = (chosen[n], written)
            self.finished += 1

    def acknowledged(self) -> bool:
        """Whether the shards have all that was committed, after up to 20 s."""
        self.client.flush(20.0)
        return not self.client.stats().pending_commits

    def _roll_out(self, chosen: dict[int, list[int]]) -> list[list[int]]:
        policy = [text(prompt, number) for number, prompt in chosen.items()]
        sessions = self.client.open(list(chosen.values()))
        written: list[list[int]] = [[] for _ in policy]
        new: list[list[int]] = [[] for _ in policy]
        while any(len(done) < len(whole) for done, whole in zip(written, policy, strict=True)):
            started = time.monotonic()
            drafts = self.client.step(sessions, new)
            self.slowest = max(self.slowest, time.monotonic() - started)
            for i, (draft, whole) in enumerate(zip(drafts, policy, strict=True)):
                new[i] = verified(draft.tokens.tolist(), whole[len(written[i]) :])
                written[i] += new[i]
        self.client.step(sessions, new, max_tokens=0)
        self.client.close(sessions, epochs=0)
        return written


def verified(draft: Iterable[int], rest: list[int]) -> list[int]:
    """What a step writes: the draft as far as the policy would have written it, and one token of the policy's own."""
    accepted = 0
    for token in draft:
        if accepted >= len(rest) - 1 or rest[accepted] != token:
            break
        accepted += 1
    return rest[: accepted + 1]


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
        """Stops, and checks: no step waited, the texts are the policy's, and all that was written is in the history."""
        self.stop()
        written: dict[int, list[int]] = {}
        for worker in self.workers:
            eventually(worker.acknowledged)
            stats = worker.client.stats()
            assert (stats.commits, stats.dropped_commits) == (len(worker.written), 0)
            assert worker.slowest < PATIENT
            for number, (prompt, tokens) in worker.written.items():
                assert tokens == text(prompt, number)
                written[number] = tokens
            closing = time.monotonic()
            worker.client.shutdown()
            assert time.monotonic() - closing < 10  # a stream that was given up must not be waited for
        kept = [tokens for prompt in PROMPTS for tokens in texts(self.watcher.history(prompt))]
        counts = Counter(tokens[-1] - 10**6 for tokens in kept)
        assert all(tokens == written[tokens[-1] - 10**6] for tokens in kept)
        assert counts.keys() == written.keys()
