"""The input of a step, and the limits of its drafts."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from histospec.client import arguments
from histospec.client.core import tokens
from histospec.client.core.session import Session
from histospec.protocol.arrays import INT32
from histospec.protocol.costs import DEFAULT_VERIFY_COST
from histospec.protocol.limits import DEFAULT_MAX_DRAFT, MAX_DRAFT, MAX_TOKEN
from histospec.v1 import draft_pb2 as pb


class Budget(NamedTuple):
    """The arguments of `DraftClient.step` that decide how long drafts become."""

    max_tokens: int = 16
    verify_cost: float = DEFAULT_VERIFY_COST

    def check(self) -> "Budget":
        """Returns itself. Raises ValueError, naming the field that is out of range."""
        tokens, cost = self
        if type(tokens) is int and type(cost) is float and 0 <= tokens <= DEFAULT_MAX_DRAFT and 0 <= cost <= 1:
            return self  # fast path for steps
        arguments.whole("max_tokens", self.max_tokens, 0, DEFAULT_MAX_DRAFT)
        if not arguments.is_number(self.verify_cost) or not 0 <= self.verify_cost <= arguments.LARGEST:
            raise ValueError(f"verify_cost: {arguments.shown(self.verify_cost)} is not a finite number of at least 0")
        return self


class Report(NamedTuple):
    """What a worker with its own drafter verified: arguments of `DraftClient.step`. All None: it has no drafter."""

    verified: Sequence[int] | None = None
    model_drafted: Sequence[int] | None = None
    model_accepted: Sequence[int] | None = None

    def counts(self, sessions: int) -> NDArray[np.int32] | None:
        """Returns int32[sessions, 3], or None if there is nothing to report. Raises ValueError naming the argument."""
        if self.verified is self.model_drafted is self.model_accepted is None:
            return None
        if self.verified is None:
            raise ValueError("verified: must be given with model_drafted and model_accepted")
        if (self.model_drafted is None) is not (self.model_accepted is None):
            missing = "model_drafted" if self.model_drafted is None else "model_accepted"
            raise ValueError(f"{missing}: must be given; model_drafted and model_accepted belong together")
        counts = np.zeros((sessions, len(self)), INT32)
        counts[:, 0] = tokens.counts("verified", self.verified, sessions, MAX_DRAFT)
        if self.model_drafted is not None:
            counts[:, 1] = tokens.counts("model_drafted", self.model_drafted, sessions, MAX_TOKEN)
            counts[:, 2] = tokens.counts("model_accepted", self.model_accepted, sessions, MAX_TOKEN)
            if (wrong := counts[:, 2] > counts[:, 1]).any():
                i = int(wrong.argmax())
                raise ValueError(f"model_accepted[{i}]: {counts[i, 2]} are more than the {counts[i, 1]} drafted")
        return counts


NO_REPORT = Report()


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
    """int32[B, 3], the columns of `Report`; None if only the server drafts."""

    @classmethod
    def held_back(cls, sessions: list[Session]) -> "StepInput":
        """Returns a step of sessions that gained their last tokens while the client sent nothing."""
        reports = any(session.unreported is not None for session in sessions)
        report = np.zeros((len(sessions), len(NO_REPORT)), INT32) if reports else None
        return cls(sessions, [s.length for s in sessions], [], b"", report)

    def take(self, rows: Sequence[int]) -> "StepInput":
        """Returns the step of these rows alone."""
        sessions = [self.sessions[i] for i in rows]
        before = [self.before[i] for i in rows]
        text = b"".join([s.generated[4 * b : 4 * s.length] for s, b in zip(sessions, before, strict=True)])
        report = None if self.report is None else self.report[np.array(rows, np.int64)]
        return StepInput(sessions, before, [self.lengths[i] for i in rows], text, report)

    def hold_back(self, rows: Sequence[int]) -> None:
        """Keeps the report of rows that are not sent; the next step of their sessions reports for both steps."""
        if self.report is None:
            return
        for row in rows:
            session = self.sessions[row]
            before = 0 if session.unreported is None else session.unreported.astype(np.int64)
            session.unreported = np.minimum(self.report[row] + before, _MOST).astype(INT32)

    def reopened(self, row: int) -> None:
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
