"""Reads and writes the encoding of messages where protobuf would take too much memory, or too much time at once.

Two encoded bytes may be an empty part, which takes a hundred bytes decoded, or a number, which takes four. So a large
message is walked field by field before protobuf decodes it, and the walk stops at the first exceeded limit.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from io import BytesIO
from typing import Any, NamedTuple, NoReturn, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from histospec.protocol.refusals import too_many
from histospec.server.errors import HistoSpecError, InvalidRequest, LimitExceeded
from histospec.server.stores.interface import Record
from histospec.v1 import draft_pb2 as pb

T = TypeVar("T")

# Messages up to this size are not walked: whatever they hold, they decode in 2 ms to a few MiB. A step of hundreds of
# sessions is smaller.
SMALL = 64 << 10
# Up to this size, the walk skips parts without repeated fields: decoding one takes 8 ns per field and no memory. 256
# sessions that open with prompts of 1,000 tokens are smaller.
SHALLOW = 4 << 20
FIELDS_EACH = 16  # average maximum per part: twice as many as any part has
LONGEST_VARINT = 10
PIECE = 256 << 10  # bytes copied at a time: 0.1 ms

VARINT, FIXED64, BYTES, START_GROUP, END_GROUP, FIXED32 = range(6)
# Bytes of an element of a packed field. A number of variable length may take one byte.
_UNPACKED = (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_MESSAGE)
_WIDTHS = dict.fromkeys(_UNPACKED, 0) | {FieldDescriptor.TYPE_DOUBLE: 8, FieldDescriptor.TYPE_FLOAT: 4}
# The fields of a response that hold arrays, and their numbers.
_ARRAYS = {field.name: field.number for field in pb.Response.DESCRIPTOR.fields if field.type == field.TYPE_BYTES}


class Field(NamedTuple):
    """A declared field of a message."""

    name: str
    limit: int
    """How often it may appear; 0 if repeating it does not help an attacker."""
    width: int
    """Minimum bytes of an element if the field may be packed, else 0."""
    inside: "Shape | None"
    """The shape of the field's message; None for other types."""
    nested: bool
    """Whether the field's message has repeated fields."""


Shape = Mapping[int, Field]


def shape(message: Descriptor, limits: Mapping[str, int], most: int) -> Shape:
    """Returns the fields of a message by number. A repeated one may hold `most` or `limits["Message.field"]` parts."""
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
    """Yields number, wire type, start and end of the value of each field between two positions.

    Raises DecodeError if the bytes are no field. Yields the contents of a group as separate fields.
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
            raise DecodeError(f"unknown wire type {kind}")
        if at > end:
            raise DecodeError("the message is cut off")
        yield tag >> 3, kind, begin, at


def varint(data: bytes | memoryview, at: int, end: int) -> tuple[int, int]:
    """Returns the number at a position and where it ends. Raises DecodeError."""
    value = shift = 0
    for place in range(at, min(end, at + LONGEST_VARINT)):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place + 1
        shift += 7
    raise DecodeError("a number has no end")


def bounded(message: Shape, most: int) -> Callable[[bytes], None]:
    """Returns a check of encoded messages of this shape, which may hold at most `most` parts of a kind.

    The check raises LimitExceeded, and DecodeError for bytes that are not a message.
    """

    def check(data: bytes) -> None:
        if len(data) > SMALL:
            _Walk(data, most * FIELDS_EACH).through(0, len(data), message, "")

    return check


class _Walk:
    """A walk through one message."""

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
    """Raises LimitExceeded for more parts than the limit."""
    if number > limit:
        raise LimitExceeded(f"{too_many(field, number, limit)}; counting stopped there")


class Undecodable(NamedTuple):
    """Stands for a message that cannot or must not be decoded, until the service can refuse it."""

    error: HistoSpecError

    def refuse(self) -> NoReturn:
        """Raises the error."""
        raise self.error


def not_a(kind: str, data: bytes) -> InvalidRequest:
    """Returns the error for bytes that are not a message of this kind."""
    return InvalidRequest(f"message: its {len(data)} bytes are not a {kind}")


def tolerant(kind: str, decode: Callable[[bytes], T], check: Callable[[bytes], None]) -> Callable[[bytes], Any]:
    """Returns `check` then `decode`, with their errors as a value: gRPC would answer an exception with UNKNOWN."""

    def decoded(data: bytes) -> T | Undecodable:
        try:
            check(data)
            return decode(data)
        except DecodeError:
            return Undecodable(not_a(kind, data))
        except HistoSpecError as error:
            # The frames of the traceback hold the message and the error, so both would stay until a garbage collection.
            error.__context__ = error.__cause__ = None
            return Undecodable(error.with_traceback(None))

    return decoded


def unless_encoded(encode: Callable[[Any], bytes] | None) -> Callable[[Any], bytes]:
    """Returns `encode`, except that bytes stay as they are."""

    def encoded(message: Any) -> bytes:
        return message if isinstance(message, bytes) or encode is None else encode(message)

    return encoded


def history(records: Iterable[Record]) -> bytes:
    """Returns an encoded HistoryResponse with these records.

    Allocates it once, and copies the arrays into it in pieces, so that other threads run in between. To encode 45 MiB
    at once, or to copy them into a larger buffer, would stop the others for 40 to 100 ms.
    """
    parts = [part for record in records for part in _parts(record)]
    whole = BytesIO(bytes(sum(map(len, parts))))
    for part in parts:
        for start in range(0, len(part), PIECE):
            whole.write(part[start : start + PIECE])
    return whole.getvalue()


def _parts(record: Record) -> list[bytes]:
    """Returns an encoded HistoryResponse with this record, in parts: each array is one of them, and is not copied."""
    values: Iterable[tuple[str, Any]] = zip(record._fields, record, strict=True)
    numbers = {name: value for name, value in values if name not in _ARRAYS}
    parts = [pb.Response(**numbers).SerializeToString()]
    for name, number in _ARRAYS.items():
        if array := getattr(record, name):
            parts += _head(number, len(array)), array
    return [_head(pb.HistoryResponse.RESPONSES_FIELD_NUMBER, sum(map(len, parts))), *parts]


def _head(number: int, size: int) -> bytes:
    """Returns the encoding of a field of `size` bytes up to these bytes."""
    return _as_varint(number << 3 | BYTES) + _as_varint(size)


def _as_varint(value: int) -> bytes:
    encoding = bytearray()
    while value >= 0x80:
        encoding.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoding, value])
