"""The memory of a process, while a test does something to it."""

import threading


class Peak(threading.Thread):
    """The peak memory of a process above its starting level."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._file = f"/proc/{pid}/statm"
        self._over = threading.Event()
        self._before = self._most = self._read()

    def _read(self) -> int:
        with open(self._file) as file:
            return int(file.read().split()[1]) * 4096

    def run(self) -> None:
        while not self._over.wait(0.002):
            self._most = max(self._most, self._read())

    def grown(self) -> int:
        """Ends the measurement."""
        self._over.set()
        self.join()
        return max(self._most, self._read()) - self._before
