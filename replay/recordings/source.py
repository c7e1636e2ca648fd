"""Reads records from files, pipes and standard input: JSON lines, plain or gzipped, and Parquet.

The first bytes tell compressed files and Parquet. Everything except Parquet is read once, as a stream.
"""

import gzip
import io
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, BinaryIO, cast

from histospec.replay.recordings.check import PAGE, Record
from histospec.replay.recordings.values import RecordingError
from histospec.server.errors import ConfigError, reason

GZIP_MAGIC = b"\x1f\x8b"
PARQUET_MAGIC = b"PAR1"
PACKED = {b"\x28\xb5\x2f\xfd": ("zstd", "zstd -dc"), b"BZh": ("bzip2", "bzcat"), b"\xfd7zXZ": ("xz", "xzcat")}
HEAD = 5  # bytes that identify the type of a file
BOM = b"\xef\xbb\xbf"
STDIN = "-"
PIECE = 1 << 20
MAX_LINE = 1 << 30
BATCH = 256  # rows of Parquet converted at a time


@contextmanager
def opened(name: str) -> Iterator[BinaryIO]:
    """Opens a file or pipe, or standard input for `-`. Turns RecordingErrors of the block into ConfigErrors.

    Raises:
        ConfigError: it cannot be opened, or the block raised a RecordingError.

    """
    told = shown(name)
    try:
        file = open(0 if name == STDIN else name, "rb", closefd=name != STDIN)  # noqa: SIM115
    except IsADirectoryError:
        raise ConfigError(f"{told}: is a directory; give its files, such as {os.path.join(name, '*.jsonl')}") from None
    except OSError as error:
        raise ConfigError(f"{told}: {reason(error)}; give a readable file, or - for the standard input") from None
    with file:
        try:
            yield file
        except RecordingError as error:
            raise ConfigError(f"{told}: {error}") from None


def shown(name: str) -> str:
    """Returns the name of a file for messages."""
    return "the standard input" if name == STDIN else name


def is_regular(file: BinaryIO) -> bool:
    """Returns whether the file can be read more than once; a pipe cannot."""
    return stat.S_ISREG(os.fstat(file.fileno()).st_mode)


def records(file: BinaryIO) -> Iterator[Record]:
    """Yields every record of an open binary file.

    Raises:
        RecordingError: the file is unreadable, damaged or empty.

    """
    place, empty = "line 0", True
    try:
        head = _head(file)
        for record in _rows(head, file) if head[:4] == PARQUET_MAGIC else _lines(head, file):
            place, empty = record.place, False
            yield record
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RecordingError(f"after {place}: the gzip archive is damaged ({error}); copy it again") from None
    except OSError as error:
        raise RecordingError(f"after {place}: cannot be read ({reason(error)})") from None
    if empty:
        raise RecordingError(f"is empty: it has no records; give recorded rollouts ({PAGE})")


def _head(file: BinaryIO) -> bytes:
    """Returns the first bytes; a pipe may deliver them one by one."""
    head = b""
    while len(head) < HEAD and (more := file.read(HEAD - len(head))):
        head += more
    return head


def _lines(head: bytes, file: BinaryIO) -> Iterator[Record]:
    """Yields every line that is not blank, with its number from 1."""
    for magic, (name, unpack) in PACKED.items():
        if head.startswith(magic):
            raise RecordingError(f"is packed with {name}, which is not supported; {unpack} FILE | histospec replay -")
    stream = io.BufferedReader(_Rejoined(head, file))
    packed = head.startswith(GZIP_MAGIC)
    source = cast(BinaryIO, gzip.GzipFile(fileobj=stream) if packed else stream)
    number = 0
    while line := _line(source, number + 1):
        number += 1
        if packed and number == 1 and line.startswith(PARQUET_MAGIC):
            raise RecordingError("is a gzipped Parquet file; unpack it with gunzip first")
        if not line.isspace():
            content = line.removeprefix(BOM if number == 1 else b"").rstrip(b"\r\n")
            yield Record(f"line {number}", content, line.endswith(b"\n"))


def _line(source: BinaryIO, number: int) -> bytes:
    """Returns the next line. Rejects binary data early: a device may have no line that ends."""
    line = source.readline(PIECE)
    if line.endswith(b"\n") or len(line) < PIECE:
        return line
    pieces, size = [line], len(line)
    while True:
        if b"\0" in line or pieces[0].removeprefix(BOM).lstrip()[:1] not in (b"{", b""):
            raise RecordingError(f"line {number}: not JSON: expected an object that begins with {{")
        if size > MAX_LINE:
            raise RecordingError(f"line {number}: is longer than {MAX_LINE >> 20} MiB; split the file into lines")
        line = source.readline(PIECE)
        pieces.append(line)
        size += len(line)
        if line.endswith(b"\n") or len(line) < PIECE:
            return b"".join(pieces)


def _rows(head: bytes, file: BinaryIO) -> Iterator[Record]:
    """Yields every row of a Parquet file, as a dictionary by column.

    Args:
        head: the bytes already read of the file.
        file: a binary file; a pipe is copied to a temporary file, because the index of a Parquet file is at its end.

    Raises:
        RecordingError: pyarrow is not installed, or the file is damaged.

    """
    try:
        parquet: Any = import_module("pyarrow.parquet")
        arrow: Any = import_module("pyarrow")
    except ImportError:
        raise RecordingError("is a Parquet file, which needs the package pyarrow: pip install pyarrow") from None
    if not file.seekable():
        with tempfile.TemporaryFile() as copy:
            copy.write(head)
            shutil.copyfileobj(file, copy)
            yield from _rows(b"", copy)
        return
    number = 0
    try:
        for batch in parquet.ParquetFile(file).iter_batches(BATCH):
            for row in batch.to_pylist():
                number += 1
                yield Record(f"row {number}", row)
    except (arrow.ArrowException, OSError) as error:
        why = " ".join(str(error).split())[:200].rstrip(".")
        raise RecordingError(f"after row {number}: the Parquet file is damaged ({why}); copy it again") from None


class _Rejoined(io.RawIOBase):
    """A stream whose beginning was already read, as if it had not been."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head = head
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._head or self._rest.read1(len(buffer))  # type: ignore[attr-defined]
        taken, self._head = data[: len(buffer)], data[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)
