"""What a step brings, and what its drafts may cost."""

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
    """How long drafts become; the arguments of `DraftClient.step`."""

    max_tokens: int = 16
    verify_cost: float = DEFAULT_VERIFY_COST

    def check(self) -> "Budget":
        """Itself, or ValueError naming the field that cannot be."""
        arguments.whole("max_tokens", self.max_tokens, 0, DEFAULT_MAX_DRAFT)
        if not arguments.is_number(self.verify_cost) or not 0 <= self.verify_cost <= arguments.LARGEST:
            cost = arguments.shown(self.verify_cost)
            raise ValueError(f"verify_cost: {cost} is not a finite number of at least 0")
        return self


class Report(NamedTuple):
    """What a worker with a drafter of its own verified: arguments of `DraftClient.step`. All None: it has none."""

    verified: Sequence[int] | None = None
    model_drafted: Sequence[int] | None = None
    model_accepted: Sequence[int] | None = None

    def counts(self, sessions: int) -> NDArray[np.int32] | None:
        """int32[sessions, 3], or None where nothing is reported. Raises ValueError naming the argument."""
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
    """What a step brings: the sessions, which have their new tokens already, and these tokens."""

    sessions: list[Session]
    before: list[int]
    """How many tokens each had without the new ones."""
    lengths: list[int]
    """How many new ones each got."""
    tokens: bytes
    """The new ones, one session after the other."""
    report: NDArray[np.int32] | None = None
    """int32[B, 3], the columns of `Report`; None where only the server drafts."""

    @classmethod
    def held_back(cls, sessions: list[Session]) -> "StepInput":
        """Of sessions that gained their last tokens while nothing was sent."""
        reports = any(session.unreported is not None for session in sessions)
        report = np.zeros((len(sessions), len(NO_REPORT)), INT32) if reports else None
        return cls(sessions, [s.length for s in sessions], [], b"", report)

    def take(self, rows: Sequence[int]) -> "StepInput":
        """The same of these rows alone."""
        sessions = [self.sessions[i] for i in rows]
        before = [self.before[i] for i in rows]
        text = b"".join([s.generated[4 * b : 4 * s.length] for s, b in zip(sessions, before, strict=True)])
        report = None if self.report is None else self.report[np.array(rows, np.int64)]
        return StepInput(sessions, before, [self.lengths[i] for i in rows], text, report)

    def hold_back(self, rows: Sequence[int]) -> None:
        """These rows are not sent; the next step of their sessions reports for both."""
        if self.report is None:
            return
        for row in rows:
            session = self.sessions[row]
            before = 0 if session.unreported is None else session.unreported.astype(np.int64)
            session.unreported = np.minimum(self.report[row] + before, _MOST).astype(INT32)

    def reopened(self, row: int) -> None:
        """The server opens this session with its tokens before the step: of a draft before that it knows nothing."""
        if self.report is not None:
            self.report[row, 0] = 0

    def put_report(self, step: pb.Step, rows: Sequence[int]) -> None:
        """Writes the report of these rows, which are those of the message, into it."""
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
