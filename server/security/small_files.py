"""Files that people write by hand, such as a configuration; a device or a data set given in their place is refused."""

import errno
import os
from pathlib import Path

LONGEST = 16 << 20  # bytes


def read_bytes(path: Path) -> bytes:
    """All of a file. Raises OSError, also where it is longer than LONGEST."""
    with path.open("rb") as file:
        content = file.read(LONGEST + 1)
    if len(content) > LONGEST:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return content


def read_text(path: Path) -> str:
    """The same as text. Raises OSError and UnicodeDecodeError."""
    return read_bytes(path).decode()
