"""The draft engine of HistoSpec, in process.

Token ids are int32 in [0, 2**31 - 1]. An argument of tokens is a one-dimensional numpy array of dtype int32, or a list
or tuple of ints. The engine reads an array in place and copies it only if it is not contiguous. It converts lists and
tuples, and refuses every other dtype with ValueError.

A call that raises has changed nothing. Every method may be called from any thread. The methods work without the GIL,
and `step` never waits while the engine builds an index.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, TypedDict, overload

import numpy as np
import numpy.typing as npt

_Tokens: TypeAlias = npt.NDArray[np.int32] | list[int] | tuple[int, ...]
_Mask: TypeAlias = npt.NDArray[np.bool_] | npt.NDArray[np.uint8]

STEPPED: int
"""Outcome of `Engine.step`: the session stepped."""
UNKNOWN: int
"""Outcome of `Engine.step`: the session is not open, or has fewer tokens than its position says."""
TOO_LONG: int
"""Outcome of `Engine.step`: the session would have more than `most_tokens` tokens."""
COUNTERS: tuple[tuple[str, str, str, str, str], ...]
"""The counters of a namespace: (name, family, label, value, help) of each.

Counters of one family differ in the value of its label. Where the label is empty, a family has one counter, and a
server reports its sum over all namespaces.
"""
SOURCES: tuple[str, ...]
"""The sources of drafted tokens, as in `Engine.stats`."""
AGES: tuple[str, ...]
"""The ages of responses that drafts come from, in epochs behind the newest, as in `Engine.stats`."""

class _SourceStats(TypedDict):
    draft_tokens: int
    accepted_tokens: int

class _NamespaceStats(TypedDict):
    lookups_hit: int
    lookups_miss: int
    misnamed_lookups: int
    twins_hit: int
    twins_miss: int
    drafts_hit: int
    drafts_empty: int
    draft_tokens: int
    accepted_tokens: int
    generated_tokens: int
    undrafted_tokens: int
    verify_microsteps: int
    evicted_by_memory: int
    evicted_by_epochs: int
    evicted_by_responses: int
    index_failures: int
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
    """The history, the live text and the drafts of all namespaces of one shard.

    A problem is identified by its namespace and its prompt, compared token by token. Where the prompts of one problem
    differ, as in multi-turn RL, give it an explicit id (`problem=`). Problems with the same prompt are different
    problems if their ids differ, or if only one of them has an id.

    Args:
        memory_bytes: memory budget of the index, in bytes. Beyond it the engine evicts the least recently used problems
            first, then the oldest responses of problems with open sessions. It never evicts what open sessions need.
        history_epochs: how many of its newest epochs a problem keeps, at least 1. The engine removes older responses
            when it merges their segment, or when the segment holds nothing newer. Until then they still yield drafts.
        threads: how many threads draft for one batch, 1 to 64. The drafts do not depend on it.
        namespace_tokens: how many tokens of text the index over all problems of a namespace holds, 15 to 17 bytes
            each. It drafts where a problem has no history. 0 switches it off.
        history_responses: about how many of its newest responses a problem keeps, whatever their epochs; at least 1.

    Raises:
        ValueError: memory_bytes is 0, history_epochs or history_responses is less than 1, or threads is out of range.
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
        alternatives: Sequence[bytes | None] | None = None,
    ) -> None:
        """Adds finished responses to the history of a problem. When it returns, they yield drafts.

        Args:
            namespace: the training run; not empty.
            prompt: int32[n], n >= 1.
            responses: one int32[m] for each response. Empty responses are left out.
            epoch: version of the policy that sampled them.
            rewards: one for each response, None where unknown. The drafter does not use them.
            problem: explicit id of the problem, not empty. None: the prompt identifies it.
            generated: one mask for each response, bool[m] or uint8[m]; None: the policy generated all of it. Tokens
                with 0 (tool and user turns) are context: the engine matches them, but never drafts them.
            seeds: one for each response, in [-2**63, 2**63 - 1], or None: the seed of coupled sampling that it was
                drawn with. A session with the same seed drafts from this response first: see `open`.
            epochs: one for each response, in place of `epoch`.
            stored: the responses come from a store, oldest first, and are older than every response of the problem in
                the index. The engine puts them before those, keeps the twins of their own epoch, and adds them to the
                namespace index only where this evicts nothing newer.
            ahead: the server reads these stored responses before a session asks for the problem. A problem that is new
                becomes the least recently used one, so a store is read from the most wanted problem to the least
                wanted.
            alternatives: one for each response, or None: the most probable other tokens at its places, as
                `histospec.protocol.alternatives.pack` writes them.

        Raises:
            ValueError: an argument has a wrong dtype, shape, length or token; namespace, prompt or problem is empty; a
                seed or an epoch is not a 64-bit integer; the epochs of stored responses descend; `ahead` is given
                without `stored`; or alternatives do not fit their response. The message names the argument.
        """

    def open(
        self,
        namespace: str,
        prompt: _Tokens,
        *,
        problem: str | None = None,
        generated: _Tokens | None = None,
        seed: int | None = None,
        position_noise: bool = False,
    ) -> int:
        """Opens a session.

        The siblings of a session are the other open sessions of its problem. Each drafts from the text of the others.

        The twin of a session is the newest response of the problem that has the same seed and a prompt of the same
        length, from the newest two epochs. With coupled sampling the noise of a token is a function of the seed, the
        two tokens before it and the number of times that this pair occurred before (docs/coupled.md). A session
        therefore repeats its twin wherever the policy has not changed, and drafts from it first. After a difference it
        follows the twin from the nearest place behind the same four tokens. The response that the session commits
        becomes the next twin. The engine learns how often twins are right, so a seed does no harm where sampling is not
        coupled.

        Args:
            namespace: the training run; not empty.
            prompt: int32[n], n >= 1.
            problem: explicit id of the problem, not empty. None: the prompt identifies it.
            generated: int32[m], what the session generated before, if it continues a generation.
            seed: seed of coupled sampling, in [-2**63, 2**63 - 1].
            position_noise: the noise of a token is that of vLLM's model runner V2, a function of the seed, the token
                and its position.

        Returns:
            The id of the session. This engine never uses it for another session.

        Raises:
            ValueError: an argument has a wrong dtype, shape or token; namespace, prompt or problem is empty; or the
                seed is not a 64-bit integer. The message names the argument.
        """

    def open_session(
        self,
        namespace: str,
        prompt: _Tokens,
        *,
        problem: str | None = None,
        generated: _Tokens | None = None,
        seed: int | None = None,
        position_noise: bool = False,
    ) -> tuple[int, int, bool]:
        """Opens a session as `open` does, with the same errors, and says more about its problem.

        Returns:
            session: its id.
            prompt_length: how many tokens of the prompt identify the problem: all of them, or fewer in a later turn of
                a problem without an explicit id.
            known: whether the index holds finished responses of the problem.
        """

    @overload
    def step(
        self,
        sessions: npt.NDArray[np.int64],
        new_tokens: npt.NDArray[np.int32],
        new_offsets: npt.NDArray[np.int64],
        max_tokens: int = 16,
        verify_cost: float = 0.05,
        *,
        positions: npt.NDArray[np.int64],
        most_tokens: int,
        verified: npt.NDArray[np.int32] | None = None,
        model_drafted: npt.NDArray[np.int32] | None = None,
        model_accepted: npt.NDArray[np.int32] | None = None,
        runners_up: Literal[False] = False,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.uint8]]: ...
    @overload
    def step(
        self,
        sessions: npt.NDArray[np.int64],
        new_tokens: npt.NDArray[np.int32],
        new_offsets: npt.NDArray[np.int64],
        max_tokens: int = 16,
        verify_cost: float = 0.05,
        *,
        positions: npt.NDArray[np.int64],
        most_tokens: int,
        verified: npt.NDArray[np.int32] | None = None,
        model_drafted: npt.NDArray[np.int32] | None = None,
        model_accepted: npt.NDArray[np.int32] | None = None,
        runners_up: bool,
    ) -> tuple[Any, ...]: ...
    @overload
    def step(
        self,
        sessions: npt.NDArray[np.int64],
        new_tokens: npt.NDArray[np.int32],
        new_offsets: npt.NDArray[np.int64],
        max_tokens: int = 16,
        verify_cost: float = 0.05,
        *,
        positions: npt.NDArray[np.int64] | None = None,
        most_tokens: None = None,
        verified: npt.NDArray[np.int32] | None = None,
        model_drafted: npt.NDArray[np.int32] | None = None,
        model_accepted: npt.NDArray[np.int32] | None = None,
        runners_up: Literal[False] = False,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Appends the tokens that a batch of sessions generated since its last step, learns from them, and drafts.

        A session with a twin (see `open`) drafts from the twin alone while the twin can be trusted. Otherwise the
        drafter searches four sources for the context: the session's own text, its siblings, the history of its problem,
        and other problems of the namespace. A small network mixes the tokens that followed there into a probability, as
        context-mixing compressors do (M. Mahoney, "Adaptive weighing of context models for lossless data compression",
        Florida Tech TR CS-2005-16). Every step trains its weights. The index of finished responses is a compressed
        suffix tree that is searched backwards (P. Ferragina, G. Manzini, "Opportunistic data structures with
        applications", FOCS 2000).

        The same calls in the same order give the same drafts, provided that the index is at the same point: see
        `wait_until_built`.

        Args:
            sessions: int64[B], each session at most once.
            new_tokens: int32[T], the new tokens of all sessions, one session after the other.
            new_offsets: int64[B + 1], ascending from 0 to T. Session b generated
                `new_tokens[new_offsets[b]:new_offsets[b + 1]]`, which may be empty.
            max_tokens: longest draft, in tokens, at most 1,024. 0: no drafts.
            verify_cost: cost of verifying one drafted token, in units of a plain decoding step; at least 0. A draft
                ends where its survival, the product of its probabilities so far, no longer pays for this cost.
            positions: int64[B], how many tokens each session had generated before these. The engine skips tokens that
                the session has already, so a step whose answer was lost may be sent again. None: all tokens are new.
            most_tokens: how many tokens a session may have generated after this step. If given, the engine leaves out
                sessions that cannot step instead of raising, and steps the others. It needs `positions`.
            verified: int32[B], for a worker with a drafter of its own: how many tokens of the session's last draft,
                from its first on, the worker verified together with the new tokens, at most 1,024. None: the worker
                verified every draft in full. A session without new tokens reports nothing.
            model_drafted: int32[B], how many tokens of the worker's own drafter the worker verified since the session's
                last step. Needs `verified` and `model_accepted`.
            model_accepted: int32[B], how many of these the worker accepted. Needs `verified` and `model_drafted`.
            runners_up: whether to return the last two arrays.

        Returns:
            tokens: int32[D], flat. The draft of session b is `tokens[offsets[b]:offsets[b + 1]]`, which is empty for a
                session that is left out.
            offsets: int64[B + 1], ascending from 0 to D.
            probs: float32[D], in (0, 1): probability that the token is accepted, given that all tokens before it in its
                draft were.
            outcomes: uint8[B], only with `most_tokens`: `STEPPED`, `UNKNOWN` or `TOO_LONG` for each session.
            runner_up_tokens: int32[D], only with `runners_up`: the most probable of the other tokens in the token's
                place; -1 if the engine knows of no other.
            runner_up_probs: float32[D], only with `runners_up`: probability that it is right, given that all tokens
                before it in the draft were; 0 without one.

        Raises:
            KeyError: a session is not open.
            ValueError: an argument has a wrong dtype, shape or token; the offsets do not ascend from 0 to T; a session
                appears twice; a position is larger than what the session has generated; a count is out of range; or
                max_tokens or verify_cost is out of range. The message names the argument.
        """

    def close(
        self,
        session: int,
        commit: bool = True,
        *,
        epoch: int | None = None,
        alternatives: bytes | None = None,
        expected_length: int | None = None,
    ) -> npt.NDArray[np.int32] | None:
        """Ends a session. With `commit`, the tokens that it generated join the history of its problem at once.

        Args:
            session: its id.
            commit: whether its response joins the history.
            epoch: version of the policy that sampled it; None: the newest epoch of the namespace.
            alternatives: the most probable other tokens at its places, as in `ingest`.
            expected_length: how many tokens the session should have generated. If it has another number of them, it
                ends without a commit.

        Returns:
            The generated tokens, int32[n], if their number is `expected_length`. Otherwise None, also for a session
            that is not open.

        Raises:
            KeyError: the session is not open, and no length was expected.
            ValueError: the alternatives do not fit the response, which stays open.
        """

    def lengths(self, sessions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns how many tokens each session has generated, as int64[B]; -1 for a session that is not open.

        Args:
            sessions: int64[B].

        Raises:
            ValueError: `sessions` has a wrong dtype or shape.
        """

    def generated(self, session: int) -> npt.NDArray[np.int32]:
        """Returns the tokens that a session has generated, as int32[n].

        Raises:
            KeyError: the session is not open.
        """

    def history(
        self, namespace: str, prompt: _Tokens, *, problem: str | None = None
    ) -> list[tuple[npt.NDArray[np.int32], int]]:
        """Returns the history of a problem as the index holds it: (tokens int32[n], epoch) of each response.

        Indexed responses come first, in the order of their arrival, then those that still wait for their segment. The
        list is empty if the engine does not know the problem.

        Args:
            namespace: the training run; not empty.
            prompt: int32[n], n >= 1.
            problem: explicit id of the problem, not empty. None: the prompt identifies it.

        Raises:
            ValueError: an argument has a wrong dtype, shape or token; or namespace, prompt or problem is empty. The
                message names the argument.
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
        """Predicts the length of a response, as quantiles of the lengths of earlier responses.

        The quantiles are those of the responses to this problem that are longer than `generated` tokens. If there are
        none, they are those of the latest responses in the namespace, up to 256, that are longer.

        Args:
            namespace: the training run; not empty.
            prompt: int32[n], n >= 1.
            generated: tokens that the response has already.
            quantiles: Q numbers in [0, 1].
            problem: explicit id of the problem, not empty. None: the prompt identifies it.

        Returns:
            lengths: float64[Q], in tokens, linear between neighbouring observations; float64[0] if there are none.
            observations: how many lengths the quantiles are taken from.

        Raises:
            ValueError: a quantile is outside [0, 1]; an argument has a wrong dtype, shape or token; or namespace,
                prompt or problem is empty. The message names the argument.
        """

    def knows(self, namespace: str, prompt: npt.NDArray[np.int32], *, problem: str | None = None) -> bool:
        """Returns whether the index holds finished responses of a problem.

        Args:
            namespace: the training run; not empty.
            prompt: int32[n], n >= 1.
            problem: explicit id of the problem, not empty. None: the prompt identifies it.

        Raises:
            ValueError: namespace, prompt or problem is empty, or the prompt is not int32[n]. The message names the
                argument.
        """

    def shared_prompts(self, namespace: str, most: int = 64) -> tuple[int, dict[str, int]]:
        """Counts the prompts of this namespace that other namespaces have finished responses to.

        The engine looks up the prompts of the newest problems without an explicit id, at most `most` of them, in the
        other namespaces, token by token. The call takes milliseconds, most of them
        without the engine's lock. To stay within that time, it may miss a namespace that knows few of these prompts if
        there are thousands of namespaces, and it may not look at every namespace if the prompts are long.

        Args:
            namespace: the training run whose prompts are looked up.
            most: how many prompts are looked up, at most.

        Returns:
            asked: how many prompts were looked up.
            namespaces: for each namespace that knows at least one of them, how many it knows.
        """

    def estimator_state(self, namespace: str) -> bytes:
        """Returns what the drafter of a namespace has learned, about 130 KB; empty if it has learned nothing yet."""

    def restore_estimator(self, namespace: str, state: bytes) -> None:
        """Restores what the drafter of a namespace had learned, in this process or another.

        Args:
            namespace: the training run; not empty.
            state: a result of `estimator_state`.

        Raises:
            ValueError: `state` is not such a result, or another version of the estimator wrote it. Nothing changes.
        """

    def drop_namespace(self, namespace: str, *, keep_learned: bool = False) -> int:
        """Forgets the history of a namespace and what the drafter learned from it. Open sessions go on.

        Args:
            namespace: the training run.
            keep_learned: keep the namespace, its counters and what the drafter learned; forget its history alone.

        Returns:
            How many responses were forgotten; 0 if the engine does not know the namespace.
        """

    def assign(self, namespace: str, tenant: str) -> None:
        """Gives a namespace to a tenant, once the engine does not have the namespace; others belong to the tenant "".

        While memory is short, the engine evicts from the tenant furthest over its share: the budget, divided by the
        number of tenants that hold something.
        """

    def limit_tenant(self, tenant: str, bytes: int) -> None:
        """Limits what a tenant's history holds, in bytes, even if memory is not short."""

    def tenants(self) -> dict[str, int]:
        """Returns the bytes that each tenant holds."""

    def congested(self) -> bool:
        """Returns whether the caller should delay its next commit, so that memory stays within the budget.

        This is the case while responses finish faster than the engine builds segments from them, or while the engine
        frees memory beyond the budget.
        """

    def evicted(self) -> bool:
        """Returns whether the memory budget has ever evicted history of any problem."""

    def wait_until_built(self) -> None:
        """Waits until the engine has built segments from all committed responses and freed memory beyond the budget.

        Committed responses yield drafts before that, too. Use this call for measurements.
        """

    def memory_budget(self) -> int:
        """Returns the memory budget of the index, in bytes: the `memory_bytes` that the engine was made with."""

    def memory_bytes(self) -> int:
        """Returns the memory of the index, in bytes: segments, live text, sessions and their book-keeping."""

    def running_bytes(self) -> int:
        """Returns the part of `memory_bytes` that cannot be evicted: open sessions and responses that just finished."""

    def stats(self) -> _Stats:
        """Returns the counters of every namespace, and what the engine holds.

        The dictionary has `sessions` (how many are open), `index_bytes` (as `memory_bytes`), and `namespaces`. That
        maps the name of each namespace to these counters:

        - `lookups_hit`, `lookups_miss`: sessions opened on a problem with, or without, finished responses
        - `misnamed_lookups`: of the latter, those whose prompt has finished responses under another problem id, or
          without one; a few may be missed
        - `twins_hit`, `twins_miss`: sessions opened with a seed that has, or has not, a twin
        - `drafts_hit`, `drafts_empty`: drafts with at least one token, and drafts without any
        - `draft_tokens`: drafted tokens
        - `accepted_tokens`: drafted tokens that the session then generated
        - `generated_tokens`: tokens that sessions generated
        - `undrafted_tokens`: generated tokens for whose step the worker asked for no draft; each took a step of its own
        - `evicted_by_memory`, `evicted_by_epochs`, `evicted_by_responses`: responses that left the index because of the
          memory budget, the window of epochs, or the window of responses
        - `index_failures`: times that responses could not be indexed, because memory ran out or they are too long
        - `sources`: draft_tokens and accepted_tokens by the source with the longest match (`history`, `own`,
          `siblings`, `namespace`), by `twin`, or by `model`, the worker's own drafter
        - `ages`: the same numbers of tokens from history, by the age of the response with the longest match: `0`, `1`,
          `2`, `3`, `4+` epochs behind the newest of the namespace

        and to what it holds: `problems`, `sessions`, `history_responses`, `history_tokens`, `newest_epoch` and `bytes`
        of the memory budget. A namespace that was dropped and has no sessions is gone, with its counters.
        """

    def lock_times(self) -> _LockTimes:
        """Returns how long threads held the engine's lock at a time, in CPU seconds of the thread that held it.

        `counts[i]` counts the times of at most `bounds[i]` seconds that are longer than the bound before. The last
        entry counts the times longer than all bounds. `seconds` is the sum of all times, `longest` the longest since
        the start.
        """

    def counters(self) -> tuple[list[str], tuple[str, ...], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns the numbers of `stats` as columns, for servers with thousands of namespaces.

        Returns:
            namespaces: N names.
            columns: C names, those of `stats`; numbers of sources and ages are called `history.draft_tokens` or
                `4+.accepted_tokens`.
            values: int64[N, C], a row for each namespace.
            dropped: int64[C], what the namespaces that are gone had counted. With them, sums over all namespaces never
                fall.
        """

    def check_integrity(self) -> None:
        """Re-derives the invariants of everything that the engine holds, for tests.

        Raises:
            RuntimeError: an invariant does not hold; the message names it.
        """
