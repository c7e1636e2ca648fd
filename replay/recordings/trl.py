"""Reads TRL's completions: with `log_completions=True`, GRPOTrainer writes one Parquet file each time that it logs.

A row is a response: `prompt` and `completion` are text, decoded without special tokens; `step` is the training step.
If a trainer logs more often than it generates, it writes the same rows again under a later step.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from histospec.replay.recordings.check import Record
from histospec.replay.recordings.text import Text
from histospec.replay.recordings.values import Row


def rows(records: Iterable[Record], text: Text, name: str) -> Iterator[Row]:
    """Yields the responses of these records. Raises RecordingError."""
    for record in records:
        prompt = text.prompt(record, "prompt")
        yield Row(record.place, prompt, text.response(record, "completion"), record.epoch("step"))


def once(found: Sequence[Row]) -> list[Row]:
    """Returns the rows of all files in the order of their steps, without those that were logged again."""
    kept: list[Row] = []
    before: list[tuple[bytes, ...]] = []
    for _, same in groupby(sorted(found, key=_step), key=_step):
        step = list(same)
        said = [(row.prompt.tobytes(), *(turn.tokens.tobytes() for turn in row.turns)) for row in step]
        if said != before:
            kept += step
        before = said
    return kept


def _step(row: Row) -> int:
    return -1 if row.epoch is None else row.epoch
