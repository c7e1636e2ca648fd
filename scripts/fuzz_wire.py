"""Fuzzes the server's handling of received bytes with atheris; see tests/support/wire_target.py.

The arguments are libFuzzer's: folders of inputs, and options. It starts from valid messages. libFuzzer ends the process
without Python's cleanup, so the caller must remove the files in TMPDIR.
"""

import random
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["histospec.server", "tests.support.wire_target"]):
    from histospec.server.logs import lines as logs
    from tests.support import wire_target

from tests.support import hostile

DROP_EVERY = 2000
"""After this many inputs the shard forgets everything, so that it stays fast."""


def seeds(folder: Path) -> None:
    """Writes valid messages of every kind."""
    chance = random.Random(0)
    for method in hostile.METHODS:
        for number in range(8):
            messages = [hostile.sound(method, chance) for _ in range(1 + number % 3)]
            (folder / f"{method}-{number}").write_bytes(wire_target.framed(method, messages))
    for method in ("DropNamespace", "Rewind"):
        (folder / method).write_bytes(wire_target.framed(method, [b"\x0a\x07hostile"]))


def main() -> None:
    """Runs until libFuzzer ends."""
    logs.configure("json", "error")
    folder = Path(tempfile.mkdtemp(prefix="fuzz-wire-"))
    corpus = folder / "seeds"
    corpus.mkdir()
    shard = wire_target.Shard(folder / "store")
    seeds(corpus)
    taken = 0

    def take(data: bytes) -> None:
        nonlocal taken
        shard.take(data)
        taken += 1
        if taken % DROP_EVERY == 0:
            shard.forget()

    atheris.Setup([*sys.argv, str(corpus)], take)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
