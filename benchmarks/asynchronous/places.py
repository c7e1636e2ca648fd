"""Compares verified tokens and tokens per step of asynchronous and synchronous scheduling, on recorded rollouts.

    python -m benchmarks.asynchronous.places demo-0.jsonl demo-1.jsonl

It needs neither vLLM nor a server: the engine runs in this process, and requests write their recorded responses. A
draft is accepted as far as it agrees with the response. Asynchronously, the adapter's own `Asking` runs, in the order
in which vLLM calls it:

    schedule k: places ─► begin k: outcome of k-1, ask, drafts ─► verify k ─► the scheduler gets the outcome of k-1

All requests of an epoch are submitted together. A request whose end the scheduler does not know yet runs a step too
many. The drafts that such a step verifies count, too.
"""

import argparse
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.rl_study.overlap import common_prefix
from histospec.client import Draft, DraftClient
from histospec.client.engines.options import Bounds, RequestOptions
from histospec.client.vllm.asynchronous.asking import Asking, Begun
from histospec.native import Engine
from histospec.replay.recordings import read

LONGEST = 16  # tokens of a draft
NAMESPACE = "replay"

Epoch = list[tuple[list[int], list[int]]]
"""Prompts and responses."""


@dataclass(frozen=True)
class Settings:
    """How a recording is replayed.

    Attributes:
        cost: the cost to verify a token.
        together: requests that run at the same time.
        limit: the most tokens of a response, as its request says.
    """

    cost: float = 0.05
    together: int = 64
    limit: int = 1 << 30


@dataclass
class Arrived:
    """The drafts of a step, which are there at once."""

    found: list[Draft]
    done: bool = True
    deadline: float = math.inf

    def answered(self) -> range:
        """Returns the rows that were answered."""
        return range(len(self.found))

    def drafts(self) -> list[Draft]:
        """Returns the drafts."""
        return self.found


class InProcess:
    """Stands for a DraftClient: asks an engine in this process."""

    def __init__(self) -> None:
        self.engine = Engine()

    def open(self, prompts: Iterable[Sequence[int]], *options: Any) -> list[int]:
        """Opens sessions."""
        return [self.engine.open(NAMESPACE, list(prompt)) for prompt in prompts]

    def send(
        self, sessions: Sequence[int], tokens: Sequence[Sequence[int]], max_tokens: int, verify_cost: float, **told: Any
    ) -> Arrived:
        """Steps the sessions."""
        report: dict[str, Any] = {name: np.array(numbers, np.int32) for name, numbers in told.items()}
        drafted, bounds, probs = self.engine.step(
            np.array(sessions, np.int64),
            np.array([token for row in tokens for token in row], np.int32),
            np.cumsum([0, *map(len, tokens)]),
            max_tokens,
            verify_cost,
            positions=None,
            most_tokens=None,
            **report,
        )
        return Arrived([Draft(drafted[a:b], probs[a:b]) for a, b in pairwise(bounds)])

    def receive(self, step: Arrived) -> list[Draft]:
        """Returns the drafts."""
        return step.found

    def finish(self, sessions: Iterable[int], commit: bool) -> None:
        """Ends sessions; `commit` adds whole responses."""
        for session in sessions:
            self.engine.close(session, commit=commit)

    def flush(self, timeout: float | None = None) -> None:
        """Does nothing: everything is there."""

    def commit(self, prompt: list[int], response: list[int], epoch: int) -> None:
        """Adds a response to the history."""
        (session,) = self.open([prompt])
        self.send([session], [response], 0, 0)
        self.end(session, epoch)

    def end(self, session: int, epoch: int) -> None:
        """Adds a session's response to the history. Returns when others draft from it, so that replays are alike."""
        self.engine.close(session, epoch=epoch)
        self.engine.wait_until_built()


@dataclass(eq=False)
class Request:
    """A request that writes a recorded response.

    Attributes:
        id: its id.
        prompt: its prompt.
        response: what it writes.
        bounds: as its parameters say.
        written: how many tokens it has written.
        known: how many of them the scheduler knows.
        session: its session, with synchronous scheduling.
        draft: what its next step verifies, with synchronous scheduling.
    """

    id: str
    prompt: list[int]
    response: list[int]
    bounds: Bounds
    written: int = 0
    known: int = 0
    session: int = 0
    draft: list[int] = field(default_factory=list)

    def write(self, draft: Sequence[int]) -> list[int]:
        """Verifies a draft. Returns the new tokens: what it has right, and one more; [] after the end."""
        rest = self.response[self.written : self.written + len(draft) + 1]
        new = rest[: common_prefix(draft, rest) + 1]
        self.written += len(new)
        return new


@dataclass
class Counts:
    """What an epoch took.

    Attributes:
        verified: drafted tokens that were verified.
        steps: steps of a request that wrote tokens.
        tokens: tokens written.
        late: steps of a request after its end.
    """

    verified: int = 0
    steps: int = 0
    tokens: int = 0
    late: int = 0

    def add(self, draft: Sequence[int], new: Sequence[int]) -> None:
        """Adds a step of a request."""
        self.verified += len(draft)
        self.steps += bool(new)
        self.tokens += len(new)
        self.late += not new

    @property
    def rate(self) -> float:
        """Tokens per step."""
        return self.tokens / self.steps


def requests(epoch: Epoch, names: Iterator[int], settings: Settings) -> deque[Request]:
    """Returns the requests of an epoch."""
    bounds = Bounds(0, settings.limit)
    return deque(Request(f"{next(names)}", prompt, response, bounds) for prompt, response in epoch)


def synchronous(epochs: Mapping[int, Epoch], settings: Settings) -> Iterator[Counts]:
    """Replays epochs with synchronous scheduling."""
    client, names = InProcess(), count()
    for number, epoch in epochs.items():
        counts, waiting, running = Counts(), requests(epoch, names, settings), list[Request]()
        while waiting or running:
            while waiting and len(running) < settings.together:
                running.append(waiting.popleft())
                (running[-1].session,) = client.open([running[-1].prompt])
            news = {each: each.write(each.draft) for each in running}
            for each, new in news.items():
                counts.add(each.draft, new)
                if each.written == len(each.response):
                    client.send([each.session], [new], 0, settings.cost)
                    client.end(each.session, number)
            running = [each for each in running if each.written < len(each.response)]
            if running:
                sessions, tokens = [each.session for each in running], [news[each] for each in running]
                step = client.send(sessions, tokens, LONGEST, settings.cost)
                for each, draft in zip(running, step.found, strict=True):
                    each.draft = draft.tokens[: each.bounds.room(each.written)].tolist()
        yield counts


def asynchronous(epochs: Mapping[int, Epoch], settings: Settings) -> Iterator[Counts]:
    """Replays epochs with asynchronous scheduling."""
    client, names, numbers = InProcess(), count(), count()
    asking = Asking(cast(DraftClient, client), LONGEST, 1 << 30)
    for number, epoch in epochs.items():
        counts, waiting, running = Counts(), requests(epoch, names, settings), list[Request]()
        flying: dict[Request, list[int]] = {}  # outcome of the step before, which the scheduler does not know yet
        ended: list[str] = []
        while waiting or running:
            begun = [waiting.popleft() for _ in range(min(len(waiting), settings.together - len(running)))]
            rooms = {each: each.bounds.room(each.known + (each in flying)) for each in running}
            places = {each.id: min(room, LONGEST) for each, room in rooms.items() if room}
            step = [each for each in running if each.known + (each in flying) < settings.limit] + begun
            starts = [Begun(each.id, each.prompt, 0, RequestOptions(), each.bounds) for each in begun]
            drafts, _ = asking.step(next(numbers), ended, starts, places, settings.cost)
            news = {}
            for each in step:
                draft = drafts[each.id].tokens.tolist() if each.id in drafts else []
                news[each] = each.write(draft)
                counts.add(draft, news[each])
            asking.sampled([each.id for each in step], partial(after_the_end, news.values()))
            for each, new in flying.items():
                each.known += len(new)
            running += begun
            over = [each for each in running if each.known == len(each.response)]
            ended = [each.id for each in over]
            for each in over:
                client.commit(each.prompt, each.response, number)
            running = [each for each in running if each not in over]
            flying = {each: new for each, new in news.items() if each in running}
        asking.step(next(numbers), ended, [], {}, None)
        yield counts


def after_the_end(news: Iterable[list[int]]) -> list[list[int]]:
    """Returns the tokens of a step; requests that have ended write whatever follows."""
    return [new or [0] for new in news]


def epochs_of(path: Path) -> dict[int, Epoch]:
    """Returns the prompts and responses of a recording, by epoch."""
    found: dict[int, Epoch] = {}
    with path.open("rb") as file:
        for problem in read(file):
            for response in problem.responses:
                pair = problem.prompt.tolist(), response.flat().tolist()
                found.setdefault(response.epoch, []).append(pair)
    return dict(sorted(found.items()))


def total(counts: Iterable[Counts]) -> Counts:
    """Returns the sum."""
    return Counts(*map(sum, zip(*(vars(each).values() for each in counts), strict=True)))


def main() -> None:
    """Prints a table in Markdown for each recording."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", type=Path, nargs="+", help="in a format of `histospec replay`")
    parser.add_argument("--cost", type=float, default=Settings.cost, help="default %(default)g")
    parser.add_argument("--together", type=int, default=Settings.together, help="default %(default)s")
    parser.add_argument(
        "--limit", type=int, default=Settings.limit, help="the most tokens of a response; default: none"
    )
    parser.add_argument("--epochs", type=int, help="the first ones only")
    arguments = parser.parse_args()
    settings = Settings(arguments.cost, arguments.together, arguments.limit)
    for path in arguments.recordings:
        epochs = dict([*epochs_of(path).items()][: arguments.epochs])
        one, other = [*synchronous(epochs, settings)], [*asynchronous(epochs, settings)]
        print(
            f"\n| {path.name}, epoch | verified, synchronous | asynchronous | tokens per step | asynchronous | late |"
        )
        print("|---|---|---|---|---|---|")
        names = [*map(str, epochs), "all"]
        for name, a, b in zip(names, [*one, total(one)], [*other, total(other)], strict=True):
            more = b.verified / a.verified if a.verified else math.nan
            print(f"| {name} | {a.verified:,} | {b.verified:,} ({more:.2f}x) | ", end="")
            print(f"{a.rate:.2f} | {b.rate:.2f} ({b.rate / a.rate:.2f}x) | {b.late} |")


if __name__ == "__main__":
    main()
