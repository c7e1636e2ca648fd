"""Reads one response per record: users' own logs, and the files of HISTOSPEC_RECORD (docs/replay.md)."""

from collections.abc import Iterable, Iterator

from histospec.protocol.limits import MAX_EPOCH
from histospec.replay.recordings.check import Record
from histospec.replay.recordings.problems import LineText
from histospec.replay.recordings.text import Text
from histospec.replay.recordings.values import Row, Turn

WRITTEN = ("tokens", "turns", "response")
"""The fields with what the model wrote; a record has exactly one of them."""


def rows(records: Iterable[Record], text: Text, name: str) -> Iterator[Row]:
    """Yields the responses of these records. Raises RecordingError."""
    counted = _Counted()
    for record in records:
        namespace = record.name("namespace")
        yield Row(
            record.place,
            text.prompt(record, "prompt"),
            _turns(record, text),
            counted.epoch(record, namespace),
            record.name("id"),
            namespace,
            record.fields().get("group"),
        )


def _turns(record: Record, text: Text) -> tuple[Turn, ...]:
    found = [field for field in WRITTEN if record.fields().get(field) is not None]
    if len(found) != 1:
        there = " and ".join(found) if found else "none of them"
        raise record.wrong(f"needs exactly one of tokens, turns and response; has {there}")
    if found == ["turns"]:
        return Record(record.place, {"turns": record.get("turns")}).checked(LineText).arrays()
    return text.response(record, found[0])


class _Counted:
    """Epochs of responses whose worker counted weight changes, computed as the server does."""

    def __init__(self) -> None:
        self._newest: dict[object, int] = {}
        self._stated: set[object] = set()  # namespaces in which a record has named an epoch
        self._bases: dict[object, int] = {}  # by namespace and worker: epoch before the worker's first change

    def epoch(self, record: Record, namespace: object) -> int | None:
        """Returns the epoch of a response; None if the record does not say it."""
        epoch, changes = record.epoch("epoch"), record.epoch("changes")
        newest = self._newest.get(namespace, 0)
        if epoch is not None:
            self._stated.add(namespace)
        elif changes is None:
            return None
        elif namespace in self._stated:
            epoch = newest
        else:
            base = self._bases.setdefault((namespace, record.name("worker")), newest - changes)
            epoch = min(max(newest, base + changes), MAX_EPOCH)
        self._newest[namespace] = max(newest, epoch)
        return epoch
