"""The finished responses of a training step on their way to the history: what `DraftClient.keep` does for both faces.

A trainer must not end because its draft server is away. So `batch` raises ValueError for mistakes of the program alone,
before anything is sent. After that every failure is counted as a loss, which the core logs at most once a minute.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from histospec.client import arguments, values
from histospec.client.config import Config
from histospec.client.core.core import Core
from histospec.client.core.shard import Shard
from histospec.client.errors import Unavailable
from histospec.client.transport import calls
from histospec.client.transport.calls import Call
from histospec.v1 import draft_pb2 as pb


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
    """Responses to store until a time, and which of them are stored."""

    def __init__(self, size: int, groups: list[Group], patience: float) -> None:
        self.groups = groups
        self.stored = [False] * size
        """For each response, whether the server has stored it."""
        self._until = time.monotonic() + patience
        self._away: dict[Shard, str] = {}  # shards that get no further calls, and why
        self._lost: dict[Shard, list[tuple[Group, str]]] = {}  # what is not stored, and why

    def calls(self, core: Core, group: Group) -> Iterator[Call[int]]:
        """Yields the calls that store a group. Raises Unavailable if its shard is away or no time is left."""
        for call in calls.ingest_calls(core, group.request):
            left = self._until - time.monotonic()
            if call.shard in self._away:
                raise Unavailable(self._away[call.shard])
            if left <= 0:
                raise Unavailable(f"{call.what}: no time is left for it")
            yield replace(call, timeout=left)

    def keep(self, group: Group) -> None:
        """Notes that a group is stored."""
        for row in group.rows:
            self.stored[row] = True

    def lose(self, core: Core, group: Group, error: Exception) -> None:
        """Notes that a group is not stored, or not all of it."""
        shard = core.shard_of(group.request.prompt, group.request.problem)
        if isinstance(error, Unavailable):
            self._away.setdefault(shard, str(error))
        self._lost.setdefault(shard, []).append((group, str(error) or repr(error)))

    def report(self, core: Core) -> None:
        """Has the core log the losses."""
        for shard, lost in self._lost.items():
            groups = [group for group, _ in lost]
            core.lose(shard, sum(len(g.rows) for g in groups), sum(g.tokens for g in groups), lost[0][1])


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
    return Batch(size, list(groups.values()), config.timeouts.keep)


def _message(i: int, response: values.Response) -> pb.Response | None:
    """Returns row `i` of the batch as a message; None if it has no tokens: it ended before the first one."""
    name = f"responses[{i}]"
    size = len(arguments.token_bytes(f"{name}.tokens", response.tokens)) // 4
    if not size:
        return None
    reward = arguments.known_reward(f"rewards[{i}]", response.reward)
    logprobs = arguments.known_logprobs(f"logprobs[{i}]", response.logprobs, size)
    return calls.response_message(name, replace(response, reward=reward, logprobs=logprobs))
