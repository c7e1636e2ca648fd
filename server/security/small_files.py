"""Small files that people write by hand, such as a configuration. Devices and oversized files are refused."""

import errno
import os
from pathlib import Path

LONGEST = 16 << 20  # bytes


def read_bytes(path: Path) -> bytes:
    """Returns the whole file. Raises OSError, also if it is longer than LONGEST."""
    with path.open("rb") as file:
        content = file.read(LONGEST + 1)
    if len(content) > LONGEST:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return content


def read_text(path: Path) -> str:
    """Returns the whole file as text. Raises OSError and UnicodeDecodeError."""
    return read_bytes(path).decode()
