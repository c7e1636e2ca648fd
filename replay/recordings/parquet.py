"""The rows of a Parquet file, read a batch at a time by pyarrow, where that is installed."""

import shutil
import tempfile
from collections.abc import Iterator
from importlib import import_module
from typing import Any, BinaryIO

from histospec.replay.recordings.check import Record
from histospec.replay.recordings.values import RecordingError

MAGIC = b"PAR1"
BATCH = 256  # rows that are converted at once
INSTALL = "is a Parquet file, which needs the package pyarrow: pip install pyarrow"


def records(head: bytes, file: BinaryIO) -> Iterator[Record]:
    """Every row, as a dictionary by column.

    Args:
        head: what was read of the file already.
        file: a binary file; of a pipe a temporary copy is made, because a Parquet file begins at its end.

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
