"""The formats of recordings, and how the first record of a file determines its format."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from histospec.replay.recordings import nemo_rl, problems, responses, trl, verl
from histospec.replay.recordings.check import PAGE, Record
from histospec.replay.recordings.text import Text
from histospec.replay.recordings.values import Row


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


PROBLEMS = Format("one problem per record", (("responses",),), problems.rows, "the field epoch")
RESPONSES = Format("one response per record", (("prompt",), responses.WRITTEN), responses.rows, "the field epoch")
VERL = Format("rollout dumps of verl", (("input",), ("output",)), verl.rows, "the field step")
TRL = Format("completions of TRL", (("prompt",), ("completion",)), trl.rows, "the field step")
NEMO_RL = Format(
    "training data of NeMo-RL", (("token_ids",), ("token_loss_mask",)), nemo_rl.rows, "the step in the file's name"
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
