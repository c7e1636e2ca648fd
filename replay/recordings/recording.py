"""Reads one or several files as one recording, and records the assumptions about them."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import BinaryIO

from histospec.replay.recordings import grouping, problems, source, trl
from histospec.replay.recordings.check import Record
from histospec.replay.recordings.formats import PROBLEMS, TRL, Format, detect, fitting
from histospec.replay.recordings.text import Text
from histospec.replay.recordings.values import Problem, RecordingError, Row

TOKENS_ONLY = "is text; only `histospec replay --tokenizer` can tokenize it"


def read(file: BinaryIO) -> Iterator[Problem]:
    """Returns the problems of an open binary file of token ids, in any format.

    Raises:
        RecordingError: a record violates its format, the file is damaged, or it has no records.

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
        """Returns all problems that were read. Raises RecordingError."""
        if TRL in self._rows:
            once = trl.once(self._rows[TRL])
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


class _Watched(Iterator[Record]):
    """Passes records on, and remembers the last one."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._records = iter(records)
        self.last: Record | None = None

    def __next__(self) -> Record:
        self.last = next(self._records)
        return self.last


def _another(form: Format, first: Record, last: Record | None) -> str:
    """Returns a hint if an invalid record fits another format than the first one."""
    try:
        other = None if last is None or last is first else fitting(last)
    except RecordingError:
        return ""
    if other is None or other is form:
        return ""
    return f"; {first.place} has another format ({form.name}) than this ({other.name}): give files of one format"
