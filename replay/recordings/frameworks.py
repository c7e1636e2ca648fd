"""Reads what RL frameworks write: dumps of text by verl, TRL, prime-rl and SkyRL, and training data of NeMo-RL.

A reader yields the responses of records, and raises RecordingError if one violates its format.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from histospec.replay.recordings.check import Record, shown, whole
from histospec.replay.recordings.text import Text
from histospec.replay.recordings.values import Row, Turn


def texts(prompt: str, response: str) -> Callable[[Iterable[Record], Text], Iterator[Row]]:
    """Returns a reader of records that are one response each, as text or chat messages in fields of these names.

    verl: with `trainer.rollout_data_dir` it writes one `<step>.jsonl` per step, decoded without special tokens.
    TRL: with `log_completions=True`, GRPOTrainer writes a Parquet file each time that it logs. A trainer that logs more
    often than it generates writes the same rows again under a later step; `trl_once` leaves them out.
    prime-rl: `rollouts/step_<N>/train_rollouts.jsonl`, in the order in which rollouts completed.
    SkyRL: `dumped_evals/global_step_<N>_evals/<dataset>.jsonl` at each evaluation, decoded with special tokens.
    """

    def read(records: Iterable[Record], text: Text) -> Iterator[Row]:
        for record in records:
            asked = text.prompt(record, prompt)
            yield Row(record.place, asked, text.response(record, response), record.epoch("step"))

    return read


def trl_once(found: Sequence[Row]) -> list[Row]:
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


def nemo_rl(records: Iterable[Record], text: Text) -> Iterator[Row]:
    """Yields the responses of NeMo-RL's training data: `train_data_step<N>.jsonl` in its log folder, one file per step.

    A line is a response with its prompt, as token ids: `token_ids`, padded to the length of the batch; `input_lengths`,
    the number of tokens without padding; `token_loss_mask`, 1 for tokens that the model wrote. Every value is in a list
    of its own. Only the file name contains the step.
    """
    for record in records:
        tokens = np.array(record.tokens("token_ids", _alone(record.get("token_ids"))), np.int32)
        wrote = _mask(record, len(tokens))
        length = _length(record, len(tokens))
        tokens, wrote = tokens[:length], wrote[:length]
        begin = int(np.argmax(wrote)) if wrote.any() else length
        if not begin:
            raise record.wrong("token_loss_mask: begins with 1, so there is no prompt; remove the record")
        edges = [begin, *(begin + 1 + np.flatnonzero(np.diff(wrote[begin:]))).tolist(), length]
        turns = tuple(Turn(tokens[a:b], bool(wrote[a])) for a, b in pairwise(edges) if a < b)
        yield Row(record.place, tokens[:begin], turns, None)


def _alone(value: Any) -> Any:
    """Returns the only element of a list."""
    return value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list) else value


def _mask(record: Record, length: int) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """Returns bool[length]: which tokens the model wrote."""
    mask = _alone(record.get("token_loss_mask"))
    if not isinstance(mask, list) or len(mask) != length:
        size = len(mask) if isinstance(mask, list) else shown(mask)
        raise record.wrong(f"token_loss_mask: should have one entry for each of the {length} token_ids, has {size}")
    wrong = next((i for i, one in enumerate(mask) if one not in (0, 1)), None)
    if wrong is not None:
        raise record.wrong(f"token_loss_mask[{wrong}]: should be 0 or 1, is {shown(mask[wrong])}")
    return np.array(mask, np.bool_)


def _length(record: Record, most: int) -> int:
    value = record.fields().get("input_lengths", most)
    length = whole(value[0] if isinstance(value, list) and len(value) == 1 else value)
    if not isinstance(length, int) or isinstance(length, bool) or not 0 < length <= most:
        raise record.wrong(f"input_lengths: should be from 1 to {most}, the number of token_ids, is {shown(value)}")
    return length
