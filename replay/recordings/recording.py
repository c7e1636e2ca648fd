"""One or several files as one recording, and what was assumed about them."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import BinaryIO

from histospec.replay.recordings import grouping, problems, source, trl
from histospec.replay.recordings.check import Record
from histospec.replay.recordings.formats import PROBLEMS, TRL, Format, detect, fitting
from histospec.replay.recordings.text import Text
from histospec.replay.recordings.values import Problem, RecordingError, Row

TOKENS_ONLY = "is text; only `histospec replay --tokenizer` makes tokens of it"


def read(file: BinaryIO) -> Iterator[Problem]:
    """The problems of an open binary file of token ids, in any format.

    Raises:
        RecordingError: a record is not as its format says, the file is damaged, or there is no record at all.

    """
    found = source.records(file)
    first = next(found)
    whole = chain([first], found)
    if detect(first) is PROBLEMS:
        yield from problems.problems(whole)
        return
    recording = Recording(Text(refusal=TOKENS_ONLY))
    for _ in recording.add(whole, ""):
        pass
    yield from recording.problems()


class Recording:
    """One or several files, read as one.

    Args:
        text: makes tokens of text.
        fields: our names for fields that the records name otherwise: ours by theirs.
        several: whether there will be more than one file: then ids may come again, and places name their file.

    """

    def __init__(self, text: Text, fields: Mapping[str, str] | None = None, several: bool = False) -> None:
        self._text = text
        self._fields = fields or {}
        self._several = several
        self._whole: list[Problem] = []  # of a single file that has a problem a record
        self._rows: dict[Format, list[Row]] = {}
        self._files = self._empty = self._again = 0

    def read(self, file: BinaryIO, name: str) -> Iterator[None]:
        """Adds an open file of this name; yields after each of its records. Raises RecordingError."""
        found = source.records(file)
        return self.add(map(self._renamed, found) if self._fields else found, name)

    def add(self, records: Iterable[Record], name: str) -> Iterator[None]:
        """The same of its records."""
        watched = _Watched(records)
        first = next(watched)
        form = detect(first)
        self._files += 1
        try:
            if form is PROBLEMS and not self._several:
                for problem in problems.problems(chain([first], watched)):
                    self._whole.append(problem)
                    yield
                return
            kept = self._rows.setdefault(form, [])
            for row in form.rows(chain([first], watched), self._text, name):
                if row.turns:
                    kept.append(self._placed(row, name))
                self._empty += not row.turns
                yield
        except RecordingError as error:
            raise RecordingError(f"{error}{_another(form, first, watched.last)}") from None

    def problems(self) -> list[Problem]:
        """Everything that was read. Raises RecordingError."""
        if TRL in self._rows:
            once = trl.once(self._rows[TRL])
            self._again += len(self._rows[TRL]) - len(once)
            self._rows[TRL] = once
        return self._whole + grouping.problems(list(chain.from_iterable(self._rows.values())))

    def notes(self) -> list[str]:
        """What a reader should know of how the files were read, a sentence each; nothing where nothing was assumed."""
        rows = list(chain.from_iterable(self._rows.values()))
        notes = []
        for form, found in self._rows.items():
            epochs = form.epochs if any(row.epoch is not None for row in found) else grouping.BY_ORDER
            by = "id" if any(row.problem is not None for row in found) else "prompt"
            notes.append(f"read as {form.name}: {len(found):,} responses, problems by {by}; epochs: {epochs}")
        if self._text.encoded:
            notes.append(
                f"tokens: made of text by {self._text.tokenizer}; special tokens that the text lacks are missing, so "
                "the figures are close to the run's, not the same"
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
                    f"{theirs}: missing, which --fields names as {ours}; the record has {', '.join(list(there)[:12])}"
                )
        mine = {ours: there[theirs] for ours, theirs in self._fields.items()}
        others = {key: value for key, value in there.items() if key not in self._fields.values()}
        return Record(record.place, {**others, **mine})

    def _placed(self, row: Row, name: str) -> Row:
        row.place = f"{name}: {row.place}" if self._several else row.place
        return row


class _Watched(Iterator[Record]):
    """Records as they pass, and the last one."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._records = iter(records)
        self.last: Record | None = None

    def __next__(self) -> Record:
        self.last = next(self._records)
        return self.last


def _another(form: Format, first: Record, last: Record | None) -> str:
    """A hint where a wrong record is of another format than the first."""
    try:
        other = None if last is None or last is first else fitting(last)
    except RecordingError:
        return ""
    if other is None or other is form:
        return ""
    return f"; {first.place} is of another format ({form.name}) than this ({other.name}): give files of one format each"
