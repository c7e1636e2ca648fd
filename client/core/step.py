"""The values of a step: the limits of its drafts, its input, the part of each shard, and the drafts of a reply."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from histospec.client import arguments
from histospec.client.core.session import Session
from histospec.client.values import Draft
from histospec.protocol.arrays import FLOAT32, INT32
from histospec.protocol.costs import DEFAULT_VERIFY_COST
from histospec.protocol.limits import DEFAULT_MAX_DRAFT, MAX_DRAFT, MAX_TOKEN
from histospec.v1 import draft_pb2 as pb


class Budget(NamedTuple):
    """The arguments of `DraftClient.step` that decide what drafts have."""

    max_tokens: int = 16
    verify_cost: float = DEFAULT_VERIFY_COST
    runners_up: bool = False

    def check(self) -> "Budget":
        """Returns itself. Raises ValueError, naming the field that is out of range."""
        tokens, cost, _ = self
        if type(tokens) is int and type(cost) is float and 0 <= tokens <= DEFAULT_MAX_DRAFT and 0 <= cost <= 1:
            return self  # fast path for steps
        arguments.whole("max_tokens", self.max_tokens, 0, DEFAULT_MAX_DRAFT)
        if not arguments.is_number(self.verify_cost) or not 0 <= self.verify_cost <= arguments.LARGEST:
            raise ValueError(f"verify_cost: {arguments.shown(self.verify_cost)} is not a finite number of at least 0")
        return self


REPORT = ("verified", "model_drafted", "model_accepted")
"""What a worker with its own drafter reports: columns of `StepInput.report`, and arguments of `DraftClient.send`."""


def report_counts(
    verified: Sequence[int] | None,
    model_drafted: Sequence[int] | None,
    model_accepted: Sequence[int] | None,
    sessions: int,
) -> NDArray[np.int32] | None:
    """Returns int32[sessions, 3], or None if there is nothing to report. Raises ValueError naming the argument."""
    if verified is model_drafted is model_accepted is None:
        return None
    if verified is None:
        raise ValueError("verified: must be given with model_drafted and model_accepted")
    if (model_drafted is None) is not (model_accepted is None):
        missing = "model_drafted" if model_drafted is None else "model_accepted"
        raise ValueError(f"{missing}: must be given; model_drafted and model_accepted belong together")
    counts = np.zeros((sessions, len(REPORT)), INT32)
    counts[:, 0] = arguments.counts("verified", verified, sessions, MAX_DRAFT)
    if model_drafted is not None:
        counts[:, 1] = arguments.counts("model_drafted", model_drafted, sessions, MAX_TOKEN)
        counts[:, 2] = arguments.counts("model_accepted", model_accepted, sessions, MAX_TOKEN)
        if (wrong := counts[:, 2] > counts[:, 1]).any():
            i = int(wrong.argmax())
            raise ValueError(f"model_accepted[{i}]: {counts[i, 2]} are more than the {counts[i, 1]} drafted")
    return counts


class StepInput(NamedTuple):
    """The input of a step: the sessions, to which the new tokens are already appended, and these tokens."""

    sessions: list[Session]
    before: list[int]
    """The number of tokens of each session without the new ones."""
    lengths: list[int]
    """The number of new tokens of each session."""
    tokens: bytes
    """The new tokens, one session after the other."""
    report: NDArray[np.int32] | None = None
    """int32[B, 3], with the columns of REPORT; None if only the server drafts."""

    @classmethod
    def catching_up(cls, sessions: list[Session]) -> "StepInput":
        """Returns a step of sessions that gained their last tokens while the client sent nothing."""
        reports = any(session.unreported is not None for session in sessions)
        report = np.zeros((len(sessions), len(REPORT)), INT32) if reports else None
        return cls(sessions, [s.length for s in sessions], [], b"", report)

    def split(self, sizes: Iterable[int]) -> "Iterator[StepInput]":
        """Yields the step of the first sessions alone, then that of the next ones; of so many sessions each."""
        row = text = 0
        for size in sizes:
            rows = slice(row, row + size)
            lengths = self.lengths[rows]
            end = text + 4 * sum(lengths)
            report = None if self.report is None else self.report[rows]
            yield StepInput(self.sessions[rows], self.before[rows], lengths, self.tokens[text:end], report)
            row, text = row + size, end

    def postpone_report(self) -> None:
        """Keeps the report of a step that is not sent; the next step of its sessions reports for both."""
        if self.report is None:
            return
        for session, report in zip(self.sessions, self.report, strict=True):
            before = 0 if session.unreported is None else session.unreported.astype(np.int64)
            session.unreported = np.minimum(report + before, _MOST).astype(INT32)

    def clear_verified(self, row: int) -> None:
        """Clears `verified` of a row whose session the message opens: the server knows of no earlier draft."""
        if self.report is not None:
            self.report[row, 0] = 0

    def put_report(self, step: pb.Step, rows: Sequence[int]) -> None:
        """Writes the report of these rows into the message, which has the same rows."""
        if self.report is None:
            return
        report = self.report[np.array(rows, np.int64)]
        for i, row in enumerate(rows):
            session = self.sessions[row]
            if session.unreported is not None:
                report[i] = np.minimum(report[i] + session.unreported.astype(np.int64), _MOST)
                session.unreported = None
        step.verified, step.model_drafted, step.model_accepted = (column.tobytes() for column in report.T)


_MOST = np.array([MAX_DRAFT, MAX_TOKEN, MAX_TOKEN], np.int64)


_EMPTY = Draft(np.empty(0, np.int32), np.empty(0, np.float32))
_BITS = np.dtype("<u4")
_BITS_OF_ONE = int(np.float32(1).view(np.uint32))


class GarbledReply(Exception):  # noqa: N818 - what it is
    """A response contradicts itself or what was sent; nothing after it can be trusted."""


class Drafts(NamedTuple):
    """The drafts of one response, flat."""

    offsets: list[int]
    """[B + 1]"""
    tokens: NDArray[np.int32]
    probs: NDArray[np.float32]
    nonempty: int
    """How many drafts have tokens."""
    others: tuple[NDArray[np.int32], NDArray[np.float32]] | None
    """The runner-up of each token, or -1, and its probability; None: the answer has none."""

    @classmethod
    def parse(cls, response: pb.DraftResponse, sessions: int, most: int) -> "Drafts":
        """Returns the drafts of a response to a step of so many sessions that asked for `most` tokens each.

        Its time depends on what was asked, not on what was answered. Raises GarbledReply.
        """
        given = array("lengths", response.lengths, INT32)
        tokens = array("tokens", response.tokens, INT32)
        probs = array("probs", response.probs, FLOAT32)
        if len(given) != sessions:
            raise GarbledReply(f"lengths: {len(given)} drafts for {sessions} sessions")
        lengths = given.tolist()
        if min(lengths, default=0) < 0 or max(lengths, default=0) > most:
            wrong = next(n for n in lengths if not 0 <= n <= most)
            raise GarbledReply(f"lengths: a draft of {wrong} tokens, at most {most} were asked for")
        offsets = list(accumulate(lengths, initial=0))
        if offsets[-1] != len(tokens) or len(probs) != len(tokens):
            raise GarbledReply(f"lengths: they do not add up to {len(tokens)} tokens and {len(probs)} probabilities")
        if len(tokens):
            if np.minimum.reduce(tokens) < 0:
                raise GarbledReply(f"tokens: {tokens.min()} is negative")
            _check_probs("probs", probs)
        others = _runners_up(response, tokens) if response.runner_up_tokens else None
        return cls(offsets, tokens, probs, len(lengths) - lengths.count(0), others)


def _runners_up(
    response: pb.DraftResponse, drafted: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    tokens = array("runner_up_tokens", response.runner_up_tokens, INT32)
    probs = array("runner_up_probs", response.runner_up_probs, FLOAT32)
    if not len(tokens) == len(probs) == len(drafted):
        raise GarbledReply(
            f"runner_up_tokens: {len(tokens)}, with {len(probs)} probabilities, of {len(drafted)} tokens"
        )
    if (tokens < -1).any() or (tokens == drafted).any():
        raise GarbledReply("runner_up_tokens: one is below -1, or is the drafted token")
    _check_probs("runner_up_probs", probs)
    return tokens, probs


def _check_probs(name: str, probs: NDArray[np.float32]) -> None:
    # As unsigned integers, floats of [0, 1] are in order, and all others are larger, NaN too.
    if np.maximum.reduce(probs.view(_BITS)) > _BITS_OF_ONE:
        raise GarbledReply(f"{name}: {probs[probs.view(_BITS).argmax()]} is outside [0, 1]")


def array(name: str, data: bytes, dtype: np.dtype) -> NDArray:  # type: ignore[type-arg]
    """Returns a field of a response as an array. Raises GarbledReply."""
    if len(data) % dtype.itemsize:
        raise GarbledReply(f"{name}: {len(data)} bytes are not a whole number of {dtype.name} values")
    return np.frombuffer(data, dtype)


@dataclass(slots=True, eq=False)
class Part:
    """The part of a step that one shard has to answer."""

    rows: Sequence[int]
    """The rows of its sessions in the step."""
    begun: float
    """When it was sent, on the monotonic clock."""
    opens: int = 0
    """Bytes of opens ahead of it."""
    commits: int = 0
    """Bytes of commits ahead of it."""
    drafts: list[tuple[Sequence[int], Drafts]] = field(default_factory=list)
    """The drafts that have arrived, with their rows."""
    done: bool = False
    """Whether all have arrived, or the client waits no longer."""


@dataclass(slots=True, eq=False)
class Pending:
    """A step that was sent and not yet received."""

    size: int
    deadline: float
    """On the monotonic clock."""
    parts: list[tuple[Any, Part]] = field(default_factory=list)
    """With the shard of each."""
    touched: list[Any] = field(default_factory=list)
    """Shards that have something to write, or are still to be found."""
    _made: tuple[int, list[Draft]] = (-1, [])
    """What `drafts` last returned, and from how many answers."""

    def __repr__(self) -> str:
        answered = sum(part.done for _, part in self.parts)
        return f"<Pending step of {self.size} sessions: {answered} of {len(self.parts)} shards done>"

    @property
    def done(self) -> bool:
        """Whether every shard has answered or was given up."""
        for _, part in self.parts:  # noqa: SIM110 - the loop asks after each event; `all` takes three times as long
            if not part.done:
                return False
        return True

    def answered(self) -> list[int]:
        """Returns the rows whose drafts, perhaps empty ones, have arrived; after the deadline still more may."""
        return [part.rows[row] for _, part in self.parts for rows, _ in part.drafts for row in rows]

    def drafts(self) -> list[Draft]:
        """Returns the drafts that have arrived, and empty ones for the others; the same list until more arrive."""
        answers = sum(len(part.drafts) for _, part in self.parts)
        if self._made[0] != answers:
            self._made = answers, self._read()
        return self._made[1]

    def tokens(self, vocabulary: int) -> list[list[int]]:
        """Returns the tokens of the drafts that have arrived, and empty lists for the others. Cheaper than `drafts`.

        Also empty is a draft with a token of `vocabulary` or more, perhaps of another tokenizer.
        """
        found: list[list[int] | None] = [None] * self.size
        for _, part in self.parts:
            rows_of_step = part.rows
            for rows, (offsets, tokens, *_) in part.drafts:
                flat = tokens.tolist()
                drafts = [flat[start:end] for start, end in pairwise(offsets)]
                if tokens.max(initial=0) >= vocabulary:
                    drafts = [draft if max(draft, default=0) < vocabulary else [] for draft in drafts]
                if len(drafts) == self.size:  # of all sessions, in order
                    return drafts
                for row, draft in zip(rows, drafts, strict=True):
                    found[rows_of_step[row]] = draft
        return [draft or [] for draft in found]

    def _read(self) -> list[Draft]:
        drafts = [_EMPTY] * self.size
        for _, part in self.parts:
            rows_of_step = part.rows
            for rows, (offsets, tokens, probs, _, others) in part.drafts:
                start = 0
                for row, end in zip(rows, offsets[1:], strict=True):
                    if start != end:
                        drafts[rows_of_step[row]] = Draft(tokens[start:end], probs[start:end])
                        if others is not None:
                            drafts[rows_of_step[row]].runners_up = others[0][start:end], others[1][start:end]
                        start = end
        return drafts
