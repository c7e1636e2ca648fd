"""Bounds what a message becomes when it is decoded, by reading its encoding.

Two encoded bytes may be an empty part, which takes a hundred bytes once it is decoded, or a number of four. So a large
message is walked field by field before protobuf decodes it, up to the first limit that it exceeds and no further.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from histospec.protocol.refusals import too_many
from histospec.server.errors import LimitExceeded

# A message of so many bytes is not walked: whatever it is made of, it decodes in 2 ms to a few MiB. A step of hundreds
# of sessions is smaller.
SMALL = 64 << 10
# Up to so many bytes, parts that hold nothing repeated are not entered: their fields take 8 ns each to decode, and no
# memory. 256 sessions that open with prompts of 1,000 tokens are smaller.
SHALLOW = 4 << 20
FIELDS_EACH = 16  # that a part may have, on average: twice as many as any has
LONGEST_VARINT = 10

VARINT, FIXED64, BYTES, START_GROUP, END_GROUP, FIXED32 = range(6)
# Bytes of an element where several are packed into one field. A number of variable length may be one byte.
_UNPACKED = (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_MESSAGE)
_WIDTHS = dict.fromkeys(_UNPACKED, 0) | {FieldDescriptor.TYPE_DOUBLE: 8, FieldDescriptor.TYPE_FLOAT: 4}


class Field(NamedTuple):
    """Of a message, as it is declared."""

    name: str
    limit: int
    """How often it may be there; 0 where repeating it gains nothing."""
    width: int
    """Bytes of an element where several may be packed into one field, else 0."""
    inside: "Shape | None"
    """Where it is a message."""
    nested: bool
    """Whether something is repeated inside."""


Shape = Mapping[int, Field]


def shape(message: Descriptor, limits: Mapping[str, int], most: int) -> Shape:
    """The fields of a message by number; of a repeated one there may be `most`, or `limits["Message.field"]`."""
    found = {}
    for field in message.fields:
        limit = limits.get(f"{message.name}.{field.name}", most) if _repeated(field) else 0
        inside = shape(field.message_type, limits, most) if field.message_type else None
        nested = any(part.limit for part in (inside or {}).values())
        found[field.number] = Field(field.name, limit, _WIDTHS.get(field.type, 1), inside, nested)
    return found


def _repeated(field: FieldDescriptor) -> bool:
    if hasattr(field, "is_repeated"):
        return bool(field.is_repeated)
    return bool(field.label == FieldDescriptor.LABEL_REPEATED)  # type: ignore[attr-defined]  # protobuf 5


def fields(data: bytes | memoryview, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Number, wire type, and where the value begins and ends, of each field between two places.

    Raises DecodeError where there is no field. The contents of a group come as fields of their own.
    """
    while at < end:
        tag = data[at]
        at += 1
        if tag >= 0x80:
            tag, at = varint(data, at - 1, end)
        kind = tag & 7
        begin = at
        if kind == BYTES:
            size, begin = varint(data, at, end)
            at = begin + size
        elif kind == VARINT:
            _, at = varint(data, at, end)
        elif kind == FIXED64:
            at += 8
        elif kind == FIXED32:
            at += 4
        elif kind not in (START_GROUP, END_GROUP):
            raise DecodeError(f"there is no wire type {kind}")
        if at > end:
            raise DecodeError("it is cut off")
        yield tag >> 3, kind, begin, at


def varint(data: bytes | memoryview, at: int, end: int) -> tuple[int, int]:
    """The number at a place, and where it ends. Raises DecodeError."""
    value = shift = 0
    for place in range(at, min(end, at + LONGEST_VARINT)):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place + 1
        shift += 7
    raise DecodeError("a number has no end")


def bounded(message: Shape, most: int) -> Callable[[bytes], None]:
    """A check of encoded messages of this shape, in which no more than `most` parts of a kind may be.

    What it returns raises LimitExceeded, and DecodeError for bytes that are no message.
    """

    def check(data: bytes) -> None:
        if len(data) > SMALL:
            _Walk(data, most * FIELDS_EACH).through(0, len(data), message, "")

    return check


class _Walk:
    """Through one message."""

    def __init__(self, data: bytes, most: int) -> None:
        self._data = data
        self._left = self._most = most
        self._deep = len(data) > SHALLOW

    def through(self, at: int, end: int, message: Shape, path: str) -> None:
        counts: dict[int, int] = {}
        for number, kind, begin, stop in fields(self._data, at, end):
            self._left -= 1
            if self._left < 0:
                refuse_more("message: its fields", self._most + 1, self._most)
            field = message.get(number)
            if field is None:
                continue
            count = counts.get(number, 0)
            if field.limit:
                counts[number] = count + ((stop - begin) // field.width if field.width and kind == BYTES else 1)
                if counts[number] > field.limit:
                    refuse_more(f"{path}{field.name}", counts[number], field.limit)
            if field.inside is not None and kind == BYTES and (self._deep or field.nested):
                index = f"[{count}]" if field.limit else ""
                self.through(begin, stop, field.inside, f"{path}{field.name}{index}.")


def refuse_more(field: str, number: int, limit: int) -> None:
    """Raises LimitExceeded for a number of parts over the limit."""
    if number > limit:
        raise LimitExceeded(f"{too_many(field, number, limit)}; counting stopped there")
