"""Reads verl's rollout dumps: `trainer.rollout_data_dir` makes it write one `<step>.jsonl` per training step.

A line is a response: `input` and `output` are text, decoded without special tokens; `step` is the training step.
`score`, `gts` and the fields of the reward function do not matter for drafting.
"""

from collections.abc import Iterable, Iterator

from histospec.replay.recordings.check import Record
from histospec.replay.recordings.text import Text
from histospec.replay.recordings.values import Row


def rows(records: Iterable[Record], text: Text, name: str) -> Iterator[Row]:
    """Yields the responses of these records. Raises RecordingError."""
    for record in records:
        prompt = text.prompt(record, "input")
        yield Row(record.place, prompt, text.response(record, "output"), record.epoch("step"))
