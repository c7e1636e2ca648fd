"""Files that may change while the server runs."""

from collections.abc import Iterable
from pathlib import Path


class Watched:
    """Tells whether files have changed. Ask before reading them: what changes while they are read shows next time."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = tuple(paths)
        self._seen: tuple[tuple[int, int, int], ...] = ()

    def changed(self) -> bool:
        """Whether they are others than when this was last asked; at first they are. Raises OSError."""
        states = [path.stat() for path in self._paths]
        seen = tuple((state.st_ino, state.st_mtime_ns, state.st_size) for state in states)
        changed, self._seen = seen != self._seen, seen
        return changed
