"""The types of options: how text becomes a value, and what is said of wrong text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, ByteSize, Field, PlainValidator, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import NoDecode

from histospec.server.settings.addresses import Address, ShardAddress

MAX_BYTES = 1 << 47  # what a process can address
MAX_COUNT = (1 << 31) - 1


def _shards(value: object) -> tuple[ShardAddress, ...]:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, Sequence):
        raise ValueError("write a list such as a:6378,b:6378")
    shards = tuple(ShardAddress.parse(item) for item in items if str(item).strip())
    if items and not shards:
        raise ValueError(f"{value!r} names no shard; write a list such as a:6378,b:6378, or leave it out")
    names = [shard.name for shard in shards]
    if len(set(names)) < len(names):
        raise ValueError("each shard may be named once")
    return shards


_BYTE_SIZE = TypeAdapter(ByteSize)


def _bytes(value: object) -> object:
    """Says how to write a size, before pydantic says only that it cannot read it."""
    try:
        size = int(_BYTE_SIZE.validate_python(value))
    except (ValidationError, OverflowError, ValueError):
        raise ValueError(f"{value!r} is not a size; write a number with a unit, for example 8GiB or 512MiB") from None
    if size > MAX_BYTES:
        raise ValueError(f"{value!r} is more than a process can address; give at most 128TiB")
    return size


def _file(value: object) -> Path | None:
    """A file that ends: a device may not."""
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
        raise ValueError(f"write otlp://HOST:PORT, for example otlp://127.0.0.1:4317, not {str(value)!r}")
    return Address.parse(address)


# NoDecode: the text of a variable is for our parsers, not JSON.
Where = Annotated[Address, NoDecode, PlainValidator(Address.parse)]
Shards = Annotated[tuple[ShardAddress, ...], NoDecode, PlainValidator(_shards)]
Collector = Annotated[Address | None, NoDecode, PlainValidator(_collector)]
Bytes = Annotated[int, BeforeValidator(_bytes)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
File = Annotated[Path | None, PlainValidator(_file)]


def is_size(field: FieldInfo) -> bool:
    """Whether an option is a number of bytes."""
    return any(isinstance(part, BeforeValidator) and part.func is _bytes for part in field.metadata)
