"""Reads one or several files as one recording: finds their format, and records the assumptions about them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import BinaryIO

from histospec.replay.recordings import documented, grouping, source
from histospec.replay.recordings.check import PAGE, Record
from histospec.replay.recordings.frameworks import nemo_rl, trl, trl_once, verl
from histospec.replay.recordings.text import Text
from histospec.replay.recordings.values import Problem, RecordingError, Row

TOKENS_ONLY = "is text; only `histospec replay --tokenizer` can tokenize it"


@dataclass(frozen=True)
class Format:
    """One format: the fields that identify it, and the reader of its responses.

    Attributes:
        name: for messages.
        fields: groups of fields; a record of this format has at least one of each group.
        rows: yields the responses of records; also takes the name of the file.
        epochs: where the format has epochs, for messages.

    """

    name: str
    fields: tuple[tuple[str, ...], ...]
    rows: Callable[[Iterable[Record], Text, str], Iterator[Row]]
    epochs: str

    def fits(self, record: Mapping[str, object]) -> bool:
        """Returns whether a record has this format's fields."""
        return all(any(record.get(field) is not None for field in group) for group in self.fields)


PROBLEMS = Format("one problem per record", (("responses",),), documented.rows, "the field epoch")
RESPONSES = Format(
    "one response per record", (("prompt",), documented.WRITTEN), documented.responses, "the field epoch"
)
VERL = Format("rollout dumps of verl", (("input",), ("output",)), verl, "the field step")
TRL = Format("completions of TRL", (("prompt",), ("completion",)), trl, "the field step")
NEMO_RL = Format(
    "training data of NeMo-RL",
    (("token_ids",), ("token_loss_mask",)),
    nemo_rl,
    "the step in the file's name",
)
FORMATS = (PROBLEMS, NEMO_RL, VERL, TRL, RESPONSES)


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
    found = source.records(file)
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
        self._files = self._empty = self._again = 0

    def read(self, file: BinaryIO, name: str) -> Iterator[None]:
        """Adds an open file; yields after each of its records. Raises RecordingError."""
        found = source.records(file)
        return self.add(map(self._renamed, found) if self._fields else found, name)

    def add(self, records: Iterable[Record], name: str) -> Iterator[None]:
        """Adds the records of a file; yields after each one."""
        records = iter(records)
        first = last = next(records)
        form = detect(first)

        def whole() -> Iterator[Record]:
            nonlocal last
            for record in chain([first], records):
                last = record
                yield record

        self._files += 1
        try:
            if form is PROBLEMS and not self._several:
                for problem in documented.problems(whole()):
                    self._whole.append(problem)
                    yield
                return
            kept = self._rows.setdefault(form, [])
            for row in form.rows(whole(), self._text, name):
                if row.turns:
                    kept.append(self._placed(row, name))
                self._empty += not row.turns
                yield
        except RecordingError as error:
            raise RecordingError(f"{error}{_another(form, first, last)}") from None

    def problems(self) -> list[Problem]:
        """Returns all problems that were read. Raises RecordingError."""
        if TRL in self._rows:
            once = trl_once(self._rows[TRL])
            self._again += len(self._rows[TRL]) - len(once)
            self._rows[TRL] = once
        return self._whole + grouping.problems(list(chain.from_iterable(self._rows.values())))

    def notes(self) -> list[str]:
        """Returns sentences about how the files were read; empty if nothing was assumed."""
        rows = list(chain.from_iterable(self._rows.values()))
        notes = []
        for form, found in self._rows.items():
            epochs = form.epochs if any(row.epoch is not None for row in found) else grouping.BY_ORDER
            by = "id" if any(row.problem is not None for row in found) else "prompt"
            notes.append(f"read as {form.name}: {len(found):,} responses, problems by {by}; epochs: {epochs}")
        if self._text.encoded:
            notes.append(
                f"tokens: made from text by {self._text.tokenizer}; special tokens that the text lacks are missing, so "
                "the figures are close to the run's, not identical"
            )
        if self._empty:
            notes.append(f"left out: {self._empty:,} responses in which the model wrote nothing")
        if self._again:
            notes.append(f"left out: {self._again:,} responses that TRL logged again under a later step")
        return notes if rows else []

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
