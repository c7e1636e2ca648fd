"""Reads one or several files as one recording: finds their format, and records the assumptions about them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import BinaryIO

from histospec.replay.recordings import documented, grouping, source
from histospec.replay.recordings.check import PAGE, Record
from histospec.replay.recordings.frameworks import nemo_rl, texts, trl_once
from histospec.replay.recordings.text import Text
from histospec.replay.recordings.values import Problem, RecordingError, Row

TOKENS_ONLY = "is text; only `histospec replay --tokenizer` can tokenize it"


@dataclass(frozen=True)
class Format:
    """One format: the fields that identify it, and the reader of its responses.

    Attributes:
        name: for messages.
        fields: groups of fields; a record of this format has at least one of each group.
        rows: yields the responses of records.
        epochs: where the format has epochs, for messages.

    """

    name: str
    fields: tuple[tuple[str, ...], ...]
    rows: Callable[[Iterable[Record], Text], Iterator[Row]]
    epochs: str = "the field step"

    def fits(self, record: Mapping[str, object]) -> bool:
        """Returns whether a record has this format's fields."""
        return all(any(record.get(field) is not None for field in group) for group in self.fields)


PROBLEMS = Format("one problem per record", (("responses",),), documented.rows, "the field epoch")
RESPONSES = Format(
    "one response per record", (("prompt",), documented.WRITTEN), documented.responses, "the field epoch"
)
VERL = Format("rollout dumps of verl", (("input",), ("output",)), texts("input", "output"))
SKYRL = Format(
    "evaluation dumps of SkyRL", (("input_prompt",), ("output_response",)), texts("input_prompt", "output_response")
)
PRIME_RL = Format(
    "rollouts of prime-rl", (("prompt",), ("completion",), ("example_id",)), texts("prompt", "completion")
)
TRL = Format("completions of TRL", (("prompt",), ("completion",)), texts("prompt", "completion"))
NEMO_RL = Format("training data of NeMo-RL", (("token_ids",), ("token_loss_mask",)), nemo_rl)
FORMATS = (PROBLEMS, NEMO_RL, VERL, SKYRL, PRIME_RL, TRL, RESPONSES)
MORE = ("namespace", "id", "group", "epoch", "changes", "worker", "step", "input_lengths")
"""Fields that readers use besides those that identify a format."""
COLUMNS = frozenset(MORE).union(*(group for one in FORMATS for group in one.fields))
"""What is read of a Parquet file: other columns may hold what Python cannot represent."""


def fitting(record: Record) -> Format | None:
    """Returns the format whose fields a record has; None if no format fits. Raises RecordingError."""
    fields = record.fields()
    return next((one for one in FORMATS if one.fits(fields)), None)


def detect(record: Record) -> Format:
    """Returns the format of a file that begins with this record.

    Raises:
        RecordingError: no format fits; the message lists the known ones.

    """
    found = fitting(record)
    if found is not None:
        return found
    known = "; ".join(f"{one.name}: {' and '.join('|'.join(group) for group in one.fields)}" for one in FORMATS)
    there = ", ".join(list(record.fields())[:12]) or "none"
    raise record.wrong(
        f"no known format has these fields: {there}. Known are {known}. Name yours with --fields "
        f"prompt=FIELD,response=FIELD ({PAGE})"
    )


def read(file: BinaryIO) -> Iterator[Problem]:
    """Returns the problems of an open binary file of token ids, in any format.

    Raises:
        RecordingError: a record violates its format, the file is damaged, or it has no records.

    """
    found = source.records(file, COLUMNS)
    first = next(found)
    whole = chain([first], found)
    if detect(first) is PROBLEMS:
        yield from documented.problems(whole)
        return
    recording = Recording(Text(refusal=TOKENS_ONLY))
    for _ in recording.add(whole, ""):
        pass
    yield from recording.problems()


class Recording:
    """One or several files, read as one.

    Args:
        text: tokenizes text.
        fields: our names of fields that the records name differently, by their names.
        several: whether there will be more than one file; then ids may repeat, and places include the file name.

    """

    def __init__(self, text: Text, fields: Mapping[str, str] | None = None, several: bool = False) -> None:
        self._text = text
        self._fields = fields or {}
        self._several = several
        self._whole: list[Problem] = []  # from a single file with one problem per record
        self._rows: dict[Format, list[Row]] = {}
        self._empty = self._again = 0
        self._by_name: set[Format] = set()  # whose epochs are the steps in the files' names

    def read(self, file: BinaryIO, name: str, step: int | None = None) -> Iterator[None]:
        """Adds an open file; yields after each of its records.

        Args:
            file: a binary file.
            name: for messages.
            step: the epoch of its records if they have none.

        Raises:
            RecordingError: it is no valid recording.

        """
        found = source.records(file, COLUMNS.union(self._fields.values()))
        return self.add(map(self._renamed, found) if self._fields else found, name, step)

    def add(self, records: Iterable[Record], name: str, step: int | None = None) -> Iterator[None]:
        """Adds the records of a file; yields after each one. Takes arguments and raises like `read`."""
        records = iter(records)
        first = last = next(records)
        form = detect(first)

        def whole() -> Iterator[Record]:
            nonlocal last
            for record in chain([first], records):
                last = record
                yield record

        try:
            if form is PROBLEMS and not self._several:
                for problem in documented.problems(whole()):
                    self._whole.append(problem)
                    yield
                return
            kept: list[Row] = []
            for row in form.rows(whole(), self._text):
                written = any(turn.generated for turn in row.turns)
                if written:
                    kept.append(self._placed(row, name))
                self._empty += not written
                yield
        except RecordingError as error:
            raise RecordingError(f"{error}{_another(form, first, last)}") from None
        if step is not None and all(row.epoch is None for row in kept):
            self._by_name.add(form)
            for row in kept:
                row.epoch = step
        self._rows.setdefault(form, []).extend(kept)

    def problems(self) -> list[Problem]:
        """Returns all problems that were read. Raises RecordingError."""
        if TRL in self._rows:
            once = trl_once(self._rows[TRL])
            self._again += len(self._rows[TRL]) - len(once)
            self._rows[TRL] = once
        return self._whole + grouping.problems(list(self._all()))

    def notes(self) -> list[str]:
        """Returns sentences about how the files were read; empty if nothing was assumed."""
        notes: list[str] = []
        for form, found in self._rows.items():
            epochs = self._epochs(form, found)
            by = grouping.told_by(found)
            notes.append(f"read as {form.name}: {len(found):,} responses, problems by {by}; epochs: {epochs}")
        if self._text.encoded:
            notes.append(
                f"tokens: made from text by {self._text.tokenizer}; special tokens that the text lacks are missing, so "
                "the figures are close to the run's, not identical"
            )
        notes += self._tool_text()
        if self._text.reasoned:
            notes.append(
                f"reasoning: {self._text.reasoned:,} messages have it in a field of its own; it counts as the model's, "
                "before the content and an empty line, and lacks the tags that the chat template writes around it"
            )
        if self._text.mended:
            notes.append(f"read as U+FFFD: half surrogate pairs in {self._text.mended:,} texts")
        if self._empty:
            notes.append(f"left out: {self._empty:,} responses in which the model wrote nothing")
        if self._again:
            notes.append(f"left out: {self._again:,} responses that TRL logged again under a later step")
        return notes if any(self._rows.values()) else []

    @property
    def undated(self) -> bool:
        """Whether nothing tells visits apart: the records have neither an epoch nor a group."""
        return any(self._rows.values()) and all(row.epoch is None and row.group is None for row in self._all())

    def _all(self) -> Iterator[Row]:
        return chain.from_iterable(self._rows.values())

    def _epochs(self, form: Format, rows: Sequence[Row]) -> str:
        """Returns where the epochs of these rows come from."""
        if form in self._by_name:
            return "the step in the files' names"
        if any(row.epoch is not None for row in rows):
            return form.epochs
        return grouping.NO_EPOCHS if self.undated else grouping.BY_GROUP

    def _tool_text(self) -> Iterator[str]:
        """Yields what was assumed about texts that the model did not write."""
        tools = self._text.tools
        if tools.cut:
            yield (
                f"tools' text: {tools.letters:,} characters in {tools.cut:,} responses stand between marks of tools or "
                "users, so they are context and not the model's; --no-tool-marks counts them as the model's"
            )
        elif tools.known and tools.uncut:
            yield (
                f"turns: no known mark of a tool's text is in the {tools.uncut:,} responses, so all of it counts as "
                "the model's; if tools answered in them, name the marks with --tool-marks BEGIN END"
            )

    def _renamed(self, record: Record) -> Record:
        there = record.fields()
        for ours, theirs in self._fields.items():
            if theirs not in there:
                raise record.wrong(
                    f"{theirs}: missing, but --fields names it for {ours}; the record has {', '.join(list(there)[:12])}"
                )
        mine = {ours: there[theirs] for ours, theirs in self._fields.items()}
        others = {key: value for key, value in there.items() if key not in self._fields.values()}
        return Record(record.place, {**others, **mine})

    def _placed(self, row: Row, name: str) -> Row:
        row.place = f"{name}: {row.place}" if self._several else row.place
        return row


def _another(form: Format, first: Record, last: Record) -> str:
    """Returns a hint if an invalid record fits another format than the first one."""
    try:
        other = None if last is first else fitting(last)
    except RecordingError:
        return ""
    if other is None or other is form:
        return ""
    return f"; {first.place} has another format ({form.name}) than this ({other.name}): give files of one format"
