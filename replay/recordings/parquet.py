"""Reads the rows of a Parquet file in batches with pyarrow, if it is installed."""

import shutil
import tempfile
from collections.abc import Iterator
from importlib import import_module
from typing import Any, BinaryIO

from histospec.replay.recordings.check import Record
from histospec.replay.recordings.values import RecordingError

MAGIC = b"PAR1"
BATCH = 256  # rows converted at a time
INSTALL = "is a Parquet file, which needs the package pyarrow: pip install pyarrow"


def records(head: bytes, file: BinaryIO) -> Iterator[Record]:
    """Yields every row as a dictionary by column.

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
        raise RecordingError(INSTALL) from None
    if not file.seekable():
        with tempfile.TemporaryFile() as copy:
            copy.write(head)
            shutil.copyfileobj(file, copy)
            yield from records(b"", copy)
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
