"""What goes into the client and comes out of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Tokens: TypeAlias = Sequence[int] | NDArray[np.integer]
"""Token ids, each in [0, 2^31)."""

_BRIEF = 8
"""Elements of a list that a repr shows."""


def brief(value: Any) -> str:
    """A value for a repr: of a long list its beginning and its length."""
    if not hasattr(value, "__len__") or isinstance(value, str):
        return repr(value)
    items = (f"{item:.3g}" if isinstance(item, float | np.floating) else f"{item}" for item in islice(value, _BRIEF))
    head = ", ".join(items)
    return f"[{head}]" if len(value) <= _BRIEF else f"[{head}, ... {len(value)} in all]"


@dataclass(frozen=True, eq=False)
class Response:
    """A finished response."""

    tokens: Tokens
    """int32[n] when it comes from the server. Not empty."""
    logprobs: Sequence[float] | NDArray[np.floating] | None = None
    """float32[n]: log-probability of each token under the policy that sampled it."""
    reward: float | None = None
    epoch: int | None = None
    """Filled in by `history`; `ingest` takes the epoch as its own argument."""
    generated: Sequence[bool] | NDArray[np.bool_] | None = None
    """bool[n]: False for tool and user turns, which are context and never drafted. None: the policy wrote it all."""
    seed: int | None = None
    """int64: the sampling seed that it was drawn with. None: nobody knows it."""

    def __repr__(self) -> str:
        said = {each.name: getattr(self, each.name) for each in fields(self)[1:]}
        rest = [f"{name}={brief(value)}" for name, value in said.items() if value is not None]
        return f"Response({', '.join([brief(self.tokens), *rest])})"


@dataclass(slots=True, eq=False)
class Draft:
    """A proposed continuation of one session; empty when there is nothing to propose, or nothing came in time."""

    tokens: NDArray[np.int32]
    """int32[k], read-only"""
    probs: NDArray[np.float32]
    """float32[k], read-only: estimated probability that a token is accepted, given that all before it were"""

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"Draft({brief(self.tokens)}, probs={brief(self.probs)})"


@dataclass(frozen=True, eq=False)
class LengthPrediction:
    """How long a response to a problem will be."""

    quantiles: NDArray[np.float64]
    """float64[q], each in [0, 1]"""
    lengths: NDArray[np.float64]
    """float64[q], in tokens; empty when neither the problem nor its namespace has a longer response"""
    observations: int
    """Responses that the estimate rests on."""


@dataclass(frozen=True)
class Shard:
    """A shard of the service."""

    name: str
    address: str
    """host:port"""


@dataclass
class ShardStats:
    """What became of the finished responses of one shard's problems."""

    pending: int = 0
    """Kept, because the shard has not acknowledged them yet."""
    pending_bytes: int = 0
    """The same, in bytes of their tokens, prompts and logprobs."""
    committed: int = 0
    """Acknowledged by the shard."""
    dropped: int = 0
    """Given up: the shard holds more than its share of the limits, or refused them."""


@dataclass
class Stats:
    """What a client has seen since it was made. Counts are of steps a shard, so a step over two shards counts twice.

    The server counts how many drafted tokens were accepted: it compares each draft with the tokens that come next. See
    `histospec_accepted_tokens_total` beside `histospec_draft_tokens_total`, or the status page. Counting it here would
    cost a step of 256 sessions 6 % more of the worker's time, before any token is compared.
    """

    steps: int = 0
    """Steps asked for."""
    skipped: int = 0
    """Steps not sent, because the shard's breaker was open."""
    late: int = 0
    """Steps that were not answered within the deadline."""
    failed: int = 0
    """Streams that could not be made or broke off."""
    reopened: int = 0
    """Sessions opened again, after a broken stream or because the server did not know them."""
    refused: int = 0
    """Sessions that a shard refused; they never draft."""
    drafts: int = 0
    """Drafts that were not empty."""
    draft_tokens: int = 0
    commits: int = 0
    """Finished responses that the server acknowledged."""
    pending_commits: int = 0
    """Finished responses that it has not acknowledged yet."""
    dropped_commits: int = 0
    """Finished responses given up: over the limits, or refused."""
    breakers: dict[str, str] = field(default_factory=dict)
    """By shard: closed (all is well), open, or trying."""
    shards: dict[str, ShardStats] = field(default_factory=dict)
    """By shard, also of those that have left: the finished responses that it acknowledged, owes and cost."""
    recorded: int = 0
    """Finished responses in the file that HISTOSPEC_RECORD names."""
    unrecorded: int = 0
    """Finished responses that could not be written there."""


@dataclass(frozen=True)
class SharedPrompts:
    """Another namespace that knows prompts of this one."""

    namespace: str
    prompts: int
    """So many of the ones that were asked about, the newest, ..."""
    asked: int
    """... are known there, too."""


@dataclass(frozen=True)
class NamespaceFacts:
    """What a shard holds of a namespace, and since its start has seen of it."""

    problems: int
    responses: int
    sessions: int
    newest_epoch: int
    lookups_hit: int
    """Sessions that were opened on a problem with history."""
    lookups_miss: int


@dataclass(frozen=True)
class Inspection:
    """What a shard says of itself and of one namespace."""

    shard: str
    version: str
    time: float
    """Its clock, in seconds since 1970."""
    limits: dict[str, int]
    """What it takes at most: `batch` sessions in a message, `message_bytes`, `draft_tokens`, `sessions` on a stream."""
    rights: tuple[str, ...]
    """What the token of this client may do in the namespace: "read", "write", "admin"."""
    namespace: NamespaceFacts | None
    """None where the shard holds nothing of it, or this client may not read it."""
    similar: tuple[str, ...]
    """Other namespaces with nearly this name, the nearest first; at most 8 that this client may read."""
    shared: tuple[SharedPrompts, ...]
    """Other namespaces that know prompts of this one, and that this client may read; the one with the most first."""
    loaded: bool
    """Whether the shard has loaded its store. Until then it seems to know fewer problems than it does."""
    trouble: str = ""
    """Why it can store nothing until a person acts; empty where nothing is wrong, or this client may not write."""
