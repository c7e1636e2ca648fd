"""The types of options: how text becomes a value, and the error for wrong text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, ByteSize, Field, PlainValidator, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import NoDecode

from histospec.server.settings.addresses import Address, ShardAddress

MAX_BYTES = 1 << 47  # the address space of a process
MAX_COUNT = (1 << 31) - 1


def _shards(value: object) -> tuple[ShardAddress, ...]:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, Sequence):
        raise ValueError("must be a list such as a:6378,b:6378")
    shards = tuple(ShardAddress.parse(item) for item in items if str(item).strip())
    if items and not shards:
        raise ValueError(f"{value!r} names no shard; give a list such as a:6378,b:6378, or omit it")
    names = [shard.name for shard in shards]
    if len(set(names)) < len(names):
        raise ValueError("must name each shard once")
    return shards


_BYTE_SIZE = TypeAdapter(ByteSize)


def _bytes(value: object) -> object:
    """Rejects a wrong size with an example, which pydantic's own error lacks."""
    try:
        size = int(_BYTE_SIZE.validate_python(value))
    except (ValidationError, OverflowError, ValueError):
        raise ValueError(f"{value!r} is not a size; give a number with a unit, for example 8GiB or 512MiB") from None
    if size > MAX_BYTES:
        raise ValueError(f"{value!r} is larger than the address space of a process; give at most 128TiB")
    return size


def _file(value: object) -> Path | None:
    """Returns the path of a file. Rejects devices, which may never end."""
    if value is None:
        return None
    path = Path(str(value))
    if path.is_char_device() or path.is_block_device():
        raise ValueError(f"{path} is a device; give a file")
    return path


def _collector(value: object) -> Address | None:
    if value is None or isinstance(value, Address):
        return value
    scheme, _, address = str(value).partition("://")
    if scheme != "otlp":
        raise ValueError(f"must be otlp://HOST:PORT, for example otlp://127.0.0.1:4317, is {str(value)!r}")
    return Address.parse(address)


# NoDecode: our parsers read the text of a variable; it is not JSON.
Where = Annotated[Address, NoDecode, PlainValidator(Address.parse)]
Shards = Annotated[tuple[ShardAddress, ...], NoDecode, PlainValidator(_shards)]
Collector = Annotated[Address | None, NoDecode, PlainValidator(_collector)]
Bytes = Annotated[int, BeforeValidator(_bytes)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
File = Annotated[Path | None, PlainValidator(_file)]


def is_size(field: FieldInfo) -> bool:
    """Returns whether an option is a number of bytes."""
    return any(isinstance(part, BeforeValidator) and part.func is _bytes for part in field.metadata)
