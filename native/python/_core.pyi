"""The C++ core of HistoSpec, in process.

Token ids are int32 in [0, 2**31 - 1]. Where tokens are taken, a one-dimensional numpy array of dtype int32 is read as
it is (copied only if it is not contiguous), and a list or tuple of ints is converted; any other dtype is refused, never
cast. A call that raises has changed nothing. Every method may be called from any thread; the work is done without the
GIL, and `step` never waits for an index to be built.
"""

from collections.abc import Sequence
from typing import TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

_Tokens: TypeAlias = npt.NDArray[np.int32] | list[int] | tuple[int, ...]
_Mask: TypeAlias = npt.NDArray[np.bool_] | npt.NDArray[np.uint8]

STEPPED: int
UNKNOWN: int
TOO_LONG: int
"""What became of a session in `Engine.try_step`."""
COUNTERS: tuple[tuple[str, str, str, str, str], ...]
"""What a namespace counts: name, family, result, help. Numbers of one family tell its results apart; what has no result
is shown as the sum over all namespaces."""
SOURCES: tuple[str, ...]
"""Where drafted tokens come from."""
AGES: tuple[str, ...]
"""How many epochs older than the newest the response is that a token of history came from."""

class _SourceStats(TypedDict):
    draft_tokens: int
    accepted_tokens: int

class _NamespaceStats(TypedDict):
    lookups_hit: int
    lookups_miss: int
    twins_hit: int
    twins_miss: int
    drafts_hit: int
    drafts_empty: int
    draft_tokens: int
    accepted_tokens: int
    generated_tokens: int
    undrafted_tokens: int
    evicted_by_memory: int
    evicted_by_epochs: int
    evicted_by_responses: int
    problems: int
    sessions: int
    history_responses: int
    history_tokens: int
    newest_epoch: int
    bytes: int
    sources: dict[str, _SourceStats]
    ages: dict[str, _SourceStats]

class _Stats(TypedDict):
    namespaces: dict[str, _NamespaceStats]
    sessions: int
    index_bytes: int

class _LockTimes(TypedDict):
    bounds: list[float]
    counts: list[int]
    seconds: float
    longest: float

class Engine:
    """History, live text and drafts of the namespaces of one shard.

    A problem is identified by its namespace and, token by token, by its prompt; or by an explicit id (`problem=`) where
    prompts of one problem differ, as the turns of multi-turn RL do. Problems of one prompt with and without an id, or
    with different ids, are different problems.

    memory_bytes: what the index may hold, in bytes. Beyond it the least recently used problems go first, then the
    oldest responses of those with running sessions; what running sessions need stays.
    history_epochs: how many of the newest epochs of a problem are kept, at least 1. Responses of older epochs go as
    soon as the segment that holds them is merged or has nothing newer; until then they are still found.

    threads: how many threads draft for one batch, 1 to 64. What they draft does not depend on it.
    namespace_tokens: how much text, in tokens, the index over all problems of a namespace holds, about 17 bytes each:
        what drafts where a problem has no history. 0: none.
    history_responses: about how many of the newest responses of a problem are kept, whatever their epochs, at least 1.

    Raises ValueError if memory_bytes is 0, history_epochs or history_responses is less than 1, or threads is out of
    range.
    """

    def __init__(
        self,
        memory_bytes: int = 8589934592,
        *,
        history_epochs: int = 8,
        threads: int = 1,
        namespace_tokens: int = 524288,
        history_responses: int = 4096,
    ) -> None: ...
    def ingest(
        self,
        namespace: str,
        prompt: _Tokens,
        responses: Sequence[_Tokens],
        epoch: int = 0,
        rewards: Sequence[float | None] | None = None,
        *,
        problem: str | None = None,
        generated: Sequence[_Mask | None] | None = None,
        seeds: Sequence[int | None] | None = None,
        epochs: Sequence[int] | None = None,
        stored: bool = False,
        ahead: bool = False,
    ) -> None:
        """Adds finished responses to the history of a problem; on return, drafts are made from them.

        prompt: int32[n], n >= 1. responses: an int32[m] each; empty ones are left out.
        epoch: the policy's version when they were sampled.
        rewards: one a response (None where unknown); not used by the drafter.
        problem: the explicit id of the problem, not empty.
        generated: one mask a response, bool[m] or uint8[m], or None where all was generated. Where it is 0 (tool and
        user turns) the token is context: it is matched, but never drafted.
        seeds: one a response, in [-2**63, 2**63 - 1], or None: the seed of coupled sampling that gave it. A session
            with that seed drafts from it first: see open.
        epochs: one a response, in place of `epoch`.
        stored: they come from a store, oldest first, and are older than whatever the index has of the problem. They
            then stand in front of it, replace no twin of their own epoch, and drive nothing newer out of what the
            problems of the namespace share.
        ahead: stored responses of a problem that nobody uses yet: if it is new, it is the least recently used one. So a
            store is read ahead from the most wanted problem to the least wanted.

        Raises ValueError, naming the argument, for a wrong dtype, shape, length or token, an empty namespace, prompt
        or problem, a seed or epoch that is no int of 64 bits, stored responses whose epochs descend, or `ahead`
        without `stored`.
        """

    def open(
        self,
        namespace: str,
        prompt: _Tokens,
        *,
        problem: str | None = None,
        generated: _Tokens | None = None,
        seed: int | None = None,
    ) -> int:
        """Starts a session and returns its id, which no other session of this engine ever gets.

        Its siblings are the other open sessions of the same problem: each drafts from what the others generate.

        prompt: int32[n], n >= 1. generated: int32[m], what the session generated before, if it is not new.
        problem: the explicit id of the problem, not empty.
        seed: the seed of coupled sampling, in [-2**63, 2**63 - 1], where the same seed draws the same noise at the same
            position, whatever was generated. The session drafts first from its twin, token by token at the same
            position: the newest response of the problem that this seed gave behind a prompt as long, of the newest two
            epochs. What it commits is the next twin. How far twins are trusted is learned from how often they are
            right: where sampling is not coupled, a seed does no harm.

        Raises ValueError, naming the argument, for a wrong dtype, shape or token, an empty namespace, prompt or
        problem, or a seed that is no int of 64 bits.
        """

    def step(
        self,
        sessions: npt.NDArray[np.int64],
        new_tokens: npt.NDArray[np.int32],
        new_offsets: npt.NDArray[np.int64],
        max_tokens: int = 16,
        verify_cost: float = 0.05,
        *,
        positions: npt.NDArray[np.int64] | None = None,
        verified: npt.NDArray[np.int32] | None = None,
        model_drafted: npt.NDArray[np.int32] | None = None,
        model_accepted: npt.NDArray[np.int32] | None = None,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Appends what a batch of sessions generated since its last step, learns from it, and drafts what comes next.

        sessions: int64[B], each at most once. new_tokens: int32[T], flat. new_offsets: int64[B + 1], ascending from 0
        to T: session b generated new_tokens[new_offsets[b]:new_offsets[b + 1]], which may be nothing.
        max_tokens: the longest draft, in tokens; 0 for none.
        verify_cost: what verifying one drafted token costs, in units of a plain step; at least 0. A draft ends where
        its survival, the product of the probabilities so far, no longer pays for it.
        positions: int64[B], how many tokens each session had generated before these. Tokens that the session has
        already are skipped, so that a step whose answer was lost may be sent again. None: they are all new.
        verified: int32[B], for a worker with a drafter of its own: how many tokens of the session's last draft, from
        its first on, were verified with the new tokens, at most 1,024. None: every draft was verified in full.
        model_drafted, model_accepted: int32[B], how many tokens of the worker's own drafter were verified since the
        session's last step, and how many of these were accepted. Both or none, and only with `verified`.
        A session without new tokens reports nothing.

        Returns (tokens, offsets, probs): the draft of session b is tokens[offsets[b]:offsets[b + 1]].
        tokens: int32[D], flat. offsets: int64[B + 1], ascending from 0 to D.
        probs: float32[D] in (0, 1), of each token being accepted, given that all before it in its draft were.

        A session that has a twin (see open) drafts from that alone while it can be trusted. Else the drafter looks for
        the context in four sources: the session's own text, its siblings, the history of its problem, and other
        problems of the namespace. A small network mixes what followed there into a probability, as
        context-mixing compressors do (M. Mahoney, "Adaptive weighing of context models for lossless data compression",
        Florida Tech TR CS-2005-16), with weights that every step teaches. The index of finished responses is a
        compressed suffix tree that is searched backwards (P. Ferragina, G. Manzini, "Opportunistic data structures with
        applications", FOCS 2000). The same calls in the same order give the same drafts, as long as the index is at the
        same point: see wait_until_built.

        Raises KeyError if a session is not open, and ValueError, naming the argument, for a wrong dtype, shape or
        token, offsets that do not ascend from 0 to T, a session that appears twice, a position beyond what the session
        has, a count out of range, or a negative max_tokens or verify_cost.
        """

    def try_step(
        self,
        sessions: npt.NDArray[np.int64],
        new_tokens: npt.NDArray[np.int32],
        new_offsets: npt.NDArray[np.int64],
        *,
        positions: npt.NDArray[np.int64],
        most_tokens: int,
        max_tokens: int = 16,
        verify_cost: float = 0.05,
        verified: npt.NDArray[np.int32] | None = None,
        model_drafted: npt.NDArray[np.int32] | None = None,
        model_accepted: npt.NDArray[np.int32] | None = None,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
        """As step, but sessions that cannot step are left out instead of an error, and the others step.

        most_tokens: how many tokens a session may have generated.

        Returns (tokens, offsets, probs, outcomes). outcomes: uint8[B]; 0: it stepped; 1: it is not open, or has fewer
        tokens than its position says; 2: it would have more than most_tokens. A session that is left out has an empty
        draft.

        Raises ValueError as step does, but never KeyError.
        """

    def close(self, session: int, commit: bool = True, *, epoch: int | None = None) -> None:
        """Ends a session. With `commit`, what it generated joins the history of its problem at once.

        epoch: the policy's version when it was sampled; None: the newest one of the namespace.

        Raises KeyError if the session is not open.
        """

    def prompt_length(self, session: int) -> int:
        """How many tokens of the session's prompt name its problem: all of them, or fewer in a later turn of a problem
        that was not given an id.

        Raises KeyError if the session is not open.
        """

    def lengths(self, sessions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """How many tokens each session has generated, int64[B]; -1 where it is not open.

        sessions: int64[B]. Raises ValueError for a wrong dtype or shape.
        """

    def generated(self, session: int) -> npt.NDArray[np.int32]:
        """What a session has generated, int32[n]. Raises KeyError if it is not open."""

    def history(
        self, namespace: str, prompt: _Tokens, *, problem: str | None = None
    ) -> list[tuple[npt.NDArray[np.int32], int]]:
        """The history of a problem as the index holds it: (tokens int32[n], epoch) of each response.

        First what is indexed, in the order in which it came; then what still waits for its siblings. Empty where the
        problem is not known.

        Raises ValueError, naming the argument, for a wrong dtype, shape or token, an empty namespace, prompt or
        problem.
        """

    def predict_length(
        self,
        namespace: str,
        prompt: _Tokens,
        generated: int = 0,
        quantiles: Sequence[float] | npt.NDArray[np.float64] = [0.1, 0.5, 0.9, 0.99],
        *,
        problem: str | None = None,
    ) -> tuple[npt.NDArray[np.float64], int]:
        """How long a response will be in the end, as quantiles of the lengths of earlier ones.

        Counted are the responses of the problem that are longer than `generated` tokens; where it has none, the
        latest ones of the namespace (up to 1,024) that are.

        quantiles: Q numbers in [0, 1].

        Returns (lengths, observations): lengths, float64[Q], in tokens, linear between neighbouring observations, or
        float64[0] where there are none; observations, how many lengths they are quantiles of.

        Raises ValueError, naming the argument, for a quantile outside [0, 1], a wrong dtype, shape or token, an empty
        namespace, prompt or problem.
        """

    def knows(self, namespace: str, prompt: npt.NDArray[np.int32], *, problem: str | None = None) -> bool:
        """Whether the index holds finished responses of a problem.

        Raises ValueError, naming the argument, for an empty namespace or prompt, or a prompt that is not int32[n].
        """

    def shared_prompts(self, namespace: str, most: int = 64) -> tuple[int, dict[str, int]]:
        """Which other namespaces have finished responses of the prompts of this one.

        Asks for the prompts of its `most` problems that came last, but for those that an id names; compares them token
        by token. Takes milliseconds, most of them without the engine's lock: where there are thousands of namespaces,
        one that knows few of these prompts may be missed, and where prompts are long, not every namespace is looked at.

        Returns (asked, namespaces): how many prompts that were, and by namespace how many of them it knows, at least 1.
        """

    def newest_epoch(self, namespace: str) -> int:
        """The newest epoch of the responses that a namespace has seen; 0 where nothing is known."""

    def estimator_state(self, namespace: str) -> bytes:
        """What the drafter of a namespace has learned, about 130 KB; empty where it has learned nothing yet."""

    def restore_estimator(self, namespace: str, state: bytes) -> None:
        """Goes on from what estimator_state() gave, in this or another process.

        Raises ValueError, and changes nothing, if `state` is not such a state, or of another version.
        """

    def drop_namespace(self, namespace: str, *, keep_learned: bool = False) -> int:
        """Forgets the history of a namespace and what the drafter learned from it; running sessions go on.

        keep_learned: the namespace stays, with what the drafter learned and what was counted.

        Returns the number of responses forgotten, 0 where the namespace is not known.
        """

    def congested(self) -> bool:
        """Whether the next commit should wait a moment, so that memory stays within the budget.

        True while responses finish faster than they become segments, or while memory over the budget is being freed.
        """

    def evicted(self) -> bool:
        """Whether the memory budget has ever cost a problem some of its history."""

    def wait_until_built(self) -> None:
        """Waits until committed responses have become segments and memory over the budget is freed.

        Committed responses are found before, too; this is for measuring.
        """

    def memory_budget(self) -> int:
        """What the index may hold, in bytes: the `memory_bytes` that the engine was made with."""

    def memory_bytes(self) -> int:
        """What the index holds, in bytes: segments, live text, sessions and their book-keeping."""

    def running_bytes(self) -> int:
        """The part of it that running sessions and responses that have just finished need, and no eviction frees."""

    def stats(self) -> _Stats:
        """What the engine counted and holds.

        `sessions`: open sessions. `index_bytes`: as memory_bytes(). `namespaces`, by name, what is counted:

        - lookups_hit, lookups_miss: sessions opened on a problem with, or without, finished responses
        - twins_hit, twins_miss: sessions opened with a seed that has a twin, or has none
        - drafts_hit, drafts_empty: drafts with at least one token, and without any
        - draft_tokens, accepted_tokens, generated_tokens: drafted, drafted and then generated, generated by sessions
        - undrafted_tokens: of the generated ones, those for whose step no draft was asked: each took a step
        - evicted_by_memory, evicted_by_epochs, evicted_by_responses: responses that left the index for the memory
          budget, or for the window of epochs or responses

        - sources: draft_tokens and accepted_tokens by the source with the longest match: history, own, siblings,
          namespace; or twin
        - ages: the same of what came from history, by how many epochs older than the newest of the namespace the
          response with the longest match is: 0, 1, 2, 3, 4+

        and what is held: problems, sessions, history_responses, history_tokens, newest_epoch, bytes of the budget. A
        namespace that is dropped and has no sessions is forgotten with its counters.
        """

    def lock_times(self) -> _LockTimes:
        """For how long the engine's lock was held at a time, in seconds of CPU of the thread that held it.

        `counts[i]`: how often for at most `bounds[i]` seconds and longer than the bound before; the last entry counts
        what was longer than all bounds. `seconds`: the sum. `longest`: the longest time since the start.
        """

    def counters(self) -> tuple[list[str], tuple[str, ...], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """What stats() says of the namespaces, as columns: for servers that have thousands.

        Returns (namespaces, columns, values, dropped). values: int64[N, C], a row for each of the N namespaces.
        columns: C names, those of stats(); sources and ages as `history.draft_tokens` or `4+.accepted_tokens`.
        dropped: int64[C], what namespaces had counted that are forgotten, so that sums over all never fall.
        """

    def check_integrity(self) -> None:
        """Re-derives the invariants of everything held, for tests. Raises RuntimeError naming the first that fails."""
