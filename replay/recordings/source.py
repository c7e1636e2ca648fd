"""Reads records from files, pipes and standard input: JSON lines, plain or gzipped, and Parquet.

The first bytes tell compressed files and Parquet. Everything except Parquet is read once, as a stream.
"""

import gzip
import io
import os
import re
import select
import shutil
import stat
import tempfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, BinaryIO, cast

from histospec.replay.recordings.check import PAGE, Record
from histospec.replay.recordings.names import STDIN
from histospec.replay.recordings.values import RecordingError
from histospec.server.errors import ConfigError, reason

GZIP_MAGIC = b"\x1f\x8b"
PARQUET_MAGIC = b"PAR1"
HEAD = 8  # bytes that identify the type of a file
BOM = b"\xef\xbb\xbf"
_PACKED = "is packed with {}, which is not supported; {} FILE | histospec replay -"
_WIDE = "is text in UTF-16 or UTF-32, as of PowerShell's >; iconv -f {} -t UTF-8 FILE | histospec replay -"
_ARROW = "is an Arrow file; datasets.Dataset.from_file('FILE').to_parquet('FILE.parquet') writes it as Parquet"
_PICKLE = "is a file of {}, which may run code when it is read; write its records as JSON lines ({})"
FOREIGN = {
    b"\x28\xb5\x2f\xfd": _PACKED.format("zstd", "zstd -dc"),
    b"BZh": _PACKED.format("bzip2", "bzcat"),
    b"\xfd7zXZ": _PACKED.format("xz", "xzcat"),
    b"\xff\xfe\0\0": _WIDE.format("UTF-32"),
    b"\0\0\xfe\xff": _WIDE.format("UTF-32"),
    b"\xff\xfe": _WIDE.format("UTF-16"),
    b"\xfe\xff": _WIDE.format("UTF-16"),
    b"{\0": _WIDE.format("UTF-16LE"),
    b"\0{": _WIDE.format("UTF-16BE"),
    b"ARROW1": _ARROW,
    b"\xff\xff\xff\xff": _ARROW,  # the stream format, which datasets saves
    b"PK\x03\x04": _PICKLE.format("torch.save, or a zip archive", PAGE),
    b"\x80": _PICKLE.format("pickle", PAGE),
}
"""First bytes of files that hold no JSON lines, and the message; the longer of two that fit comes first."""
_CSV = re.compile(rb'"?[\w ./:()-]+"?(?:[,;\t]"?[\w ./:()-]+"?)+\s*')
_TO_LINES = "pandas.read_csv('FILE').to_json('FILE.jsonl', orient='records', lines=True)"
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
        file = io.BufferedReader(_Heard(0 if name == STDIN else name, closefd=name != STDIN))
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


def records(file: BinaryIO, columns: Collection[str]) -> Iterator[Record]:
    """Yields every record of an open binary file.

    Args:
        file: JSON lines, plain or gzipped, or Parquet.
        columns: those to read of a Parquet file; its rows have None in all others.

    Raises:
        RecordingError: the file is unreadable, damaged or empty.

    """
    place, empty = "line 0", True
    try:
        head = _head(file)
        for record in _rows(head, file, columns) if head[:4] == PARQUET_MAGIC else _lines(head, file):
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
    _refuse_foreign(head)
    stream = io.BufferedReader(_Rejoined(head, file))
    packed = head.startswith(GZIP_MAGIC)
    source = cast(BinaryIO, gzip.GzipFile(fileobj=stream) if packed else stream)
    number = 0
    while line := _line(source, number + 1):
        number += 1
        if number == 1:
            line = line.removeprefix(BOM)
            _refuse_foreign(line)
            if packed and line.startswith(PARQUET_MAGIC):
                raise RecordingError("is a gzipped Parquet file; unpack it with gunzip first")
            if _CSV.fullmatch(line):
                raise RecordingError(f"is a table of text, such as CSV; {_TO_LINES} writes its rows as JSON lines")
        if b"\0" in line:
            raise _nul(number)
        if line and not line.isspace():
            yield Record(f"line {number}", line.rstrip(b"\r\n"), line.endswith(b"\n"))


def _refuse_foreign(head: bytes) -> None:
    """Raises RecordingError if a file that begins with these bytes has another format, and says what to do."""
    for magic, what in FOREIGN.items():
        if head.startswith(magic):
            raise RecordingError(what)


def _nul(number: int) -> RecordingError:
    return RecordingError(
        f"line {number}: not JSON: has NUL bytes; the file is binary, or a crash lost this part of it, which "
        "tr -d '\\0' < FILE | histospec replay - leaves out"
    )


def _line(source: BinaryIO, number: int) -> bytes:
    """Returns the next line. Rejects binary data early: a device may have no line that ends."""
    line = source.readline(PIECE)
    if line.endswith(b"\n") or len(line) < PIECE:
        return line
    pieces, size = [line], len(line)
    while True:
        if b"\0" in line:
            raise _nul(number)
        if pieces[0].removeprefix(BOM).lstrip()[:1] not in (b"{", b""):
            raise RecordingError(f"line {number}: not JSON: expected an object that begins with {{")
        if size > MAX_LINE:
            raise RecordingError(f"line {number}: is longer than {MAX_LINE >> 20} MiB; split the file into lines")
        line = source.readline(PIECE)
        pieces.append(line)
        size += len(line)
        if line.endswith(b"\n") or len(line) < PIECE:
            return b"".join(pieces)


def _rows(head: bytes, file: BinaryIO, columns: Collection[str]) -> Iterator[Record]:
    """Yields every row of a Parquet file, as a dictionary by column.

    Args:
        head: the bytes already read of the file.
        file: a binary file; a pipe is copied to a temporary file, because the index of a Parquet file is at its end.
        columns: those to read.

    Raises:
        RecordingError: pyarrow is not installed, the file is damaged, or Python cannot represent a value.

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
            yield from _rows(b"", copy, columns)
        return
    number = 0
    try:
        table = parquet.ParquetFile(file)
        unread = dict.fromkeys(table.schema_arrow.names)
        for batch in table.iter_batches(BATCH, columns=[name for name in unread if name in columns]):
            named = zip(batch.schema.names, batch.columns, strict=True)
            read = {name: _values(name, column, number) for name, column in named}
            for i in range(len(batch)):
                number += 1
                yield Record(f"row {number}", unread | {name: values[i] for name, values in read.items()})
    except (arrow.ArrowException, OSError) as error:
        why = " ".join(str(error).split())[:200].rstrip(".")
        raise RecordingError(f"after row {number}: the Parquet file is damaged ({why}); copy it again") from None


def _values(name: str, column: Any, before: int) -> list[Any]:
    """Returns a column of the rows after the first `before` ones. Raises RecordingError."""
    try:
        return cast(list[Any], column.to_pylist())
    except (ValueError, ArithmeticError, LookupError) as error:  # ArrowInvalid is a ValueError
        why = " ".join(str(error).split())[:200].rstrip(".")
        raise RecordingError(
            f"rows {before + 1} to {before + len(column)}: {name}: a value of the type {column.type} cannot be read "
            f"({why}); write the column as numbers or text"
        ) from None


class _Heard(io.FileIO):
    """A file that waits for data only a second at a time.

    Python misses a signal that comes just before a read waits, and would handle it when the read returns.
    """

    def readinto(self, buffer: Any) -> int | None:
        waiting = select.poll()
        waiting.register(self, select.POLLIN)
        while not waiting.poll(1000):
            pass
        return super().readinto(buffer)


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
