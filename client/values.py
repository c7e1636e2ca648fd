"""The values that the client takes and returns."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Tokens: TypeAlias = Sequence[int] | NDArray[np.integer]
"""Token ids, each in [0, 2^31)."""

_BRIEF = 8
"""How many elements of a list a repr shows."""


def brief(value: Any) -> str:
    """Returns a value as text for a repr. Of a long list it shows the first elements and the length."""
    if not hasattr(value, "__len__") or isinstance(value, str):
        return repr(value)
    items = (f"{item:.3g}" if isinstance(item, float | np.floating) else f"{item}" for item in islice(value, _BRIEF))
    head = ", ".join(items)
    return f"[{head}]" if len(value) <= _BRIEF else f"[{head}, ... {len(value)} in all]"


@dataclass(frozen=True, eq=False)
class Response:
    """A finished response."""

    tokens: Tokens
    """int32[n] if it comes from the server. Not empty."""
    logprobs: Sequence[float] | NDArray[np.floating] | None = None
    """float32[n]: log-probability of each token under the policy that sampled it."""
    reward: float | None = None
    epoch: int | None = None
    """Version of the policy that sampled it. `history` sets it; `ingest` takes the epoch as its own argument."""
    generated: Sequence[bool] | NDArray[np.bool_] | None = None
    """bool[n]: False for tokens of tool and user turns, which are context and never drafted. None: the policy generated
    all tokens."""
    seed: int | None = None
    """int64: the sampling seed that it was drawn with. None: unknown."""
    alternatives: bytes | None = None
    """The most probable other tokens at its places, as `histospec.protocol.alternatives` packs them. None: unknown."""

    def __repr__(self) -> str:
        given = {each.name: getattr(self, each.name) for each in fields(self)[1:]}
        rest = [f"{name}={brief(value)}" for name, value in given.items() if value is not None]
        return f"Response({', '.join([brief(self.tokens), *rest])})"


@dataclass(slots=True, eq=False)
class Draft:
    """A draft for one session; empty if the server has none, or if it did not arrive within the deadline."""

    tokens: NDArray[np.int32]
    """int32[k], read-only"""
    probs: NDArray[np.float32]
    """float32[k], read-only: estimated probability that the token is accepted, given that all tokens before it were"""
    runners_up: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None
    """If asked for, int32[k] and float32[k]: the most probable of the other tokens in the place of each token, and the
    probability that it is right if all tokens before it are; -1 and 0 if the server knows of no other."""

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"Draft({brief(self.tokens)}, probs={brief(self.probs)})"


@dataclass(frozen=True, eq=False)
class LengthPrediction:
    """The predicted length of a response to a problem."""

    quantiles: NDArray[np.float64]
    """float64[q], each in [0, 1]"""
    lengths: NDArray[np.float64]
    """float64[q], in tokens; empty when neither the problem nor its namespace has a longer response"""
    observations: int
    """How many earlier responses the prediction is based on."""


@dataclass(frozen=True)
class Shard:
    """A shard of the service."""

    name: str
    address: str
    """host:port"""


@dataclass
class ShardStats:
    """Counts of the finished responses that belong to one shard."""

    pending: int = 0
    """Responses that the client keeps because the shard has not acknowledged them yet."""
    pending_bytes: int = 0
    """Bytes of their tokens, prompts and logprobs."""
    committed: int = 0
    """Responses that the shard acknowledged."""
    dropped: int = 0
    """Responses that were lost: the shard's responses exceeded the limits, or the shard refused them."""


@dataclass
class Stats:
    """Counters of a client since it was made. Each shard's part of a step counts, so a step over two shards counts
    twice.

    The server counts accepted tokens, because it compares each draft with the tokens that come next. See its metrics
    `histospec_accepted_tokens_total` and `histospec_draft_tokens_total`, or its status page. Counting them in the
    client would cost 6 % more of the worker's time in a step of 256 sessions, before any token is compared.
    """

    steps: int = 0
    """Steps that the worker asked for."""
    skipped: int = 0
    """Steps that the client did not send because the shard's breaker was open."""
    late: int = 0
    """Steps that the shard did not answer within the deadline."""
    failed: int = 0
    """Streams that could not be opened, or broke."""
    reopened: int = 0
    """Sessions that the client opened again, after a broken stream or because the server did not know them."""
    refused: int = 0
    """Sessions that a shard refused; they get no drafts."""
    drafts: int = 0
    """Drafts that were not empty."""
    draft_tokens: int = 0
    commits: int = 0
    """Finished responses that the server acknowledged."""
    pending_commits: int = 0
    """Finished responses that the server has not acknowledged yet."""
    dropped_commits: int = 0
    """Finished responses that were lost: they exceeded the limits, or the server refused them."""
    too_old: int = 0
    """Responses, committed or ingested, that the server acknowledged and did not keep: it keeps newer epochs of their
    problem."""
    breakers: dict[str, str] = field(default_factory=dict)
    """State of each shard's breaker: closed (the shard answers), open, or trying."""
    shards: dict[str, ShardStats] = field(default_factory=dict)
    """Counts of the finished responses of each shard, including shards that have left."""
    recorded: int = 0
    """Finished responses written to the file of HISTOSPEC_RECORD."""
    unrecorded: int = 0
    """Finished responses that could not be written to that file."""


@dataclass(frozen=True)
class SharedPrompts:
    """Another namespace that has responses to prompts of this one."""

    namespace: str
    prompts: int
    """How many of the prompts that were looked up it has responses to."""
    asked: int
    """How many prompts were looked up: the newest of this namespace."""


@dataclass(frozen=True)
class NamespaceFacts:
    """What a shard holds of a namespace, and its counters since the shard started."""

    problems: int
    responses: int
    sessions: int
    newest_epoch: int
    lookups_hit: int
    """Sessions opened on a problem with history."""
    lookups_miss: int
    """Sessions opened on a problem without history."""
    drafts_hit: int = 0
    """Drafts with tokens that workers asked for."""
    drafts_empty: int = 0
    undrafted_tokens: int = 0
    """Steps for which workers asked for no draft."""
    draft_tokens: int = 0
    """Tokens that the server drafted; of a worker with a drafter of its own, those that it verified."""
    accepted_tokens: int = 0
    generated_tokens: int = 0
    model_draft_tokens: int = 0
    """Tokens of the workers' own drafters."""
    model_accepted_tokens: int = 0
    misnamed_lookups: int = 0
    """Of `lookups_miss`, sessions whose prompt has history under another problem id, or without one."""
    behind: int = 0
    """Responses that arrived since the last one of the newest epoch."""
    behind_epoch: int = 0
    """The newest epoch of these."""


@dataclass(frozen=True)
class Inspection:
    """Facts about a shard and one namespace."""

    shard: str
    version: str
    time: float
    """The shard's clock, in seconds since 1970."""
    limits: dict[str, int]
    """The shard's limits: `batch` sessions in a message, `message_bytes`, `draft_tokens`, `sessions` on a stream."""
    rights: tuple[str, ...]
    """The rights of this client's token in the namespace: "read", "write", "admin"."""
    namespace: NamespaceFacts | None
    """None if the shard holds nothing of the namespace, or if this client may not read it."""
    similar: tuple[str, ...]
    """Other namespaces with a similar name, the most similar first; at most 8, and only those that this client may
    read."""
    shared: tuple[SharedPrompts, ...]
    """Other namespaces that have responses to prompts of this one and that this client may read; the one with the most
    prompts first."""
    loaded: bool
    """Whether the shard has loaded its store. Until then it reports fewer problems than it has."""
    trouble: str = ""
    """Why the shard cannot store responses until an operator acts; empty if it can, or if this client may not write."""
