"""The finished responses of a training step on their way to the history: what `DraftClient.keep` does for both faces.

A trainer must not end because its draft server is away. So `batch` raises ValueError for mistakes of the program alone,
before anything is sent. After that every failure is counted as a loss, which the core logs at most once a minute.
"""

from __future__ import annotations  # so that help() names types as they are written here

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from histospec.client import arguments, values
from histospec.client.config import Config
from histospec.client.core.core import Core
from histospec.client.core.outage_log import PAUSE
from histospec.client.core.shard import Shard
from histospec.client.errors import DeadlineExceeded, Unavailable
from histospec.client.transport import calls
from histospec.client.transport.calls import Call
from histospec.v1 import draft_pb2 as pb

SHORT = 0.1
"""Of `Timeouts.keep`, while a shard hangs: the full time once a minute, so that a trainer with a call for each response
does not wait for it each time."""


@dataclass
class Group:
    """The responses of a batch to one problem, of one epoch."""

    request: pb.IngestRequest
    """All of them; `calls` cuts it to fit."""
    rows: list[int]
    """Their places in the batch."""

    @property
    def tokens(self) -> int:
        """How many tokens the responses have."""
        return sum(len(response.tokens) // 4 for response in self.request.responses)


class Batch:
    """Responses to store, and which of them are stored."""

    def __init__(self, size: int, groups: list[Group]) -> None:
        self.groups = groups
        self.stored = [False] * size
        """For each response, whether the server has stored it."""
        self.begun = time.monotonic()
        self.away: dict[Shard, str] = {}
        """The shards that get no further calls, and why."""
        self.lost: dict[Shard, list[tuple[Group, str]]] = {}
        """The groups that are not stored, or not all of them, and why."""


class Keeper:
    """Stores the batches of a client, and knows which shards let it wait in vain."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._hung: dict[Shard, float] = {}  # when a call of the full patience began, on the monotonic clock

    def calls(self, batch: Batch, group: Group) -> Iterator[Call[int]]:
        """Yields the calls that store a group. Raises Unavailable if its shard is away or no time is left."""
        for call in calls.ingest_calls(self._core, group.request):
            if call.shard in batch.away:
                raise Unavailable(batch.away[call.shard])
            patience = self._core.config.timeouts.keep
            if batch.begun - self._hung.get(call.shard, -math.inf) < PAUSE:
                patience *= SHORT
            left = batch.begun + patience - time.monotonic()
            if left <= 0:
                raise Unavailable(f"{call.what}: no time is left for it")
            yield replace(call, timeout=left)
            self._hung.pop(call.shard, None)

    def keep(self, batch: Batch, group: Group, stored: int) -> None:
        """Notes how many responses of a group the server has stored; fewer, if some are too old to be kept."""
        if stored == len(group.rows):
            for row in group.rows:
                batch.stored[row] = True

    def lose(self, batch: Batch, group: Group, error: Exception) -> None:
        """Notes that a group is not stored, or not all of it."""
        shard = self._core.shard_of(group.request.prompt, group.request.problem)
        if isinstance(error, Unavailable):
            batch.away.setdefault(shard, str(error))
        if isinstance(error, DeadlineExceeded) and batch.begun - self._hung.get(shard, -math.inf) >= PAUSE:
            self._hung[shard] = batch.begun
        batch.lost.setdefault(shard, []).append((group, str(error) or repr(error)))

    def report(self, batch: Batch) -> None:
        """Has the core log the losses."""
        for shard, lost in batch.lost.items():
            groups = [group for group, _ in lost]
            responses, tokens = sum(len(g.rows) for g in groups), sum(g.tokens for g in groups)
            self._core.lose(shard, responses, tokens, lost[0][1], shard in batch.away)


def batch(
    config: Config,
    prompts: Sequence[values.Tokens],
    responses: Sequence[values.Tokens | values.Response],
    rewards: Sequence[Any] | None = None,
    logprobs: Sequence[Any] | None = None,
    generated: Sequence[Any] | None = None,
    epoch: int | Sequence[int | None] | None = None,
    problems: Sequence[str | None] | None = None,
    seeds: Sequence[int | None] | None = None,
) -> Batch:
    """Returns the batch for the arguments of `DraftClient.keep`. Raises ValueError."""
    arguments.listed("prompts", prompts, arguments.PROMPTS)
    size = len(prompts)
    arguments.listed("responses", responses, arguments.ROWS)
    arguments.same_length("responses", responses, "prompts", size)
    epochs = [arguments.epoch_number(name, v) for name, v in arguments.each("epoch", epoch, size, "prompts")]
    columns = {"reward": rewards, "logprobs": logprobs, "generated": generated, "seed": seeds}
    names = {"reward": "rewards", "seed": "seeds"}
    given = {
        field: arguments.for_each(names.get(field, field), column, arguments.VALUES, "prompts", size)
        for field, column in columns.items()
        if column is not None
    }
    ids = arguments.for_each("problems", problems, arguments.PROBLEMS, "prompts", size)
    groups: dict[tuple[bytes, str, int | None], Group] = {}
    for i, (prompt, response, problem) in enumerate(zip(prompts, responses, ids, strict=True)):
        whole = response if isinstance(response, values.Response) else values.Response(response)
        whole = replace(whole, **{field: column[i] for field, column in given.items()})
        text, name = calls.problem_of(prompt, problem, f"[{i}]")
        if (message := _message(i, whole)) is None:
            continue
        key = text, name, epochs[i]
        if key not in groups:
            request = pb.IngestRequest(namespace=config.namespace, prompt=text, problem=name, epoch=epochs[i])
            groups[key] = Group(request, [])
        groups[key].request.responses.append(message)
        groups[key].rows.append(i)
    return Batch(size, list(groups.values()))


def _message(i: int, response: values.Response) -> pb.Response | None:
    """Returns row `i` of the batch as a message; None if it has no tokens: it ended before the first one."""
    name = f"responses[{i}]"
    size = len(arguments.token_bytes(f"{name}.tokens", response.tokens)) // 4
    if not size:
        return None
    reward = arguments.known_reward(f"rewards[{i}]", response.reward)
    logprobs = arguments.known_logprobs(f"logprobs[{i}]", response.logprobs, size)
    return calls.response_message(name, replace(response, reward=reward, logprobs=logprobs))
