"""The formats of recordings, and how the first record tells which one a file has."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from histospec.replay.recordings import nemo_rl, problems, responses, trl, verl
from histospec.replay.recordings.check import PAGE, Record
from histospec.replay.recordings.text import Text
from histospec.replay.recordings.values import Row


@dataclass(frozen=True)
class Format:
    """One format: the fields that tell it, and the reader of its responses.

    Attributes:
        name: for people.
        fields: groups of fields; a record of this format has at least one of each group.
        rows: the responses of records; takes the name of the file, too.
        epochs: where it has them, for people.

    """

    name: str
    fields: tuple[tuple[str, ...], ...]
    rows: Callable[[Iterable[Record], Text, str], Iterator[Row]]
    epochs: str

    def fits(self, record: Mapping[str, object]) -> bool:
        """Whether a record has this format's fields."""
        return all(any(record.get(field) is not None for field in group) for group in self.fields)


PROBLEMS = Format("a problem a record", (("responses",),), problems.rows, "the field epoch")
RESPONSES = Format("a response a record", (("prompt",), responses.WRITTEN), responses.rows, "the field epoch")
VERL = Format("rollout dumps of verl", (("input",), ("output",)), verl.rows, "the field step")
TRL = Format("completions of TRL", (("prompt",), ("completion",)), trl.rows, "the field step")
NEMO_RL = Format(
    "training data of NeMo-RL", (("token_ids",), ("token_loss_mask",)), nemo_rl.rows, "the step in the file's name"
)
FORMATS = (PROBLEMS, NEMO_RL, VERL, TRL, RESPONSES)


def fitting(record: Record) -> Format | None:
    """The format that a record has the fields of. Raises RecordingError: it has no fields."""
    fields = record.fields()
    return next((one for one in FORMATS if one.fits(fields)), None)


def detect(record: Record) -> Format:
    """The format of a file that begins with this record.

    Raises:
        RecordingError: none that is known; says which are.

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
