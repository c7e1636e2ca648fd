"""What the names of recorded files say: their order, the training step, and one name for all of them."""

import os
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import PurePath

from histospec.server.errors import ConfigError

STDIN = "-"

_NUMBERS = re.compile(r"([0-9]+)")
_STEP = re.compile(r"(?<![a-z])(?:global_?)?(step|epoch|iter)(?:ation)?[_=-]?([0-9]{1,15})(?![0-9])", re.IGNORECASE)
_ENDINGS = re.compile(r"(\.(jsonl|ndjson|json|parquet|gz))+$", re.IGNORECASE)


def in_order(names: Sequence[str]) -> list[str]:
    """Returns files in the order of the numbers in their names: `step_2` before `step_10`, unlike a shell.

    Names of pipes mean nothing: if one is among them, all stay in the given order.
    """
    if not all(map(os.path.isfile, names)):
        return list(names)
    return sorted(names, key=lambda name: [int(part) if i % 2 else part for i, part in enumerate(_NUMBERS.split(name))])


def each_once(names: Sequence[str]) -> None:
    """Checks that no file is given twice, under another name or also compressed: its responses would count twice.

    Raises:
        ConfigError: it names both files.

    """
    seen: dict[object, str] = {}
    for name in filter(os.path.isfile, names):
        folder, file = os.path.split(os.path.abspath(name))
        found = os.stat(name)
        for same in ((found.st_dev, found.st_ino), (os.path.realpath(folder), file.removesuffix(".gz"))):
            if same in seen:
                raise ConfigError(
                    f"{name}: is the same recording as {seen[same]}, so its responses would count twice; give one of "
                    "these files"
                )
            seen[same] = name


def steps(names: Sequence[str]) -> list[int | None]:
    """Returns the training step that each name tells. A folder of all files tells none: `qwen-step1/rollouts/*.jsonl`.

    One file needs no step, as it needs no order.
    """
    if len(names) == 1:
        return [None]
    shared = _folder(names)
    return [step(os.path.relpath(name, shared)) for name in names]


def step(name: str) -> int | None:
    """Returns the training step in a file's name, or else in the nearest folder's: `step_3/rollouts.jsonl`.

    Returns None if there is none, and for `epoch_1/step_3.jsonl`, whose steps may begin again in each epoch.
    """
    parts = [_STEP.findall(part) for part in reversed(PurePath(name).parts)]
    nearest = next((i for i, found in enumerate(parts) if found), None)
    if nearest is None:
        return None
    words = {word.lower() for word, _ in chain(*parts[nearest : nearest + 2])}
    return int(parts[nearest][0][1]) if len(parts[nearest]) == len(words) == 1 else None


def base(name: str) -> str:
    """Returns the name of a file without its folder, for messages."""
    return "standard input" if name == STDIN else PurePath(name).name


def called(names: Sequence[str]) -> str:
    """Returns a name for a recording: of one file without its endings, of several files that of their common folder."""
    return _ENDINGS.sub("", base(names[0])) if len(names) == 1 else PurePath(_folder(names)).name or "recordings"


def order(names: Sequence[str]) -> list[str]:
    """Returns a sentence about the order of several files; nothing for one file."""
    if len(names) == 1:
        return []
    by = "in the order of the numbers in their names" if all(map(os.path.isfile, names)) else "in the given order"
    first, last = (os.path.relpath(name, _folder(names)) for name in (names[0], names[-1]))
    return [f"read {len(names)} files {by}: {first} to {last}"]


def _folder(names: Sequence[str]) -> str:
    return os.path.commonpath([os.path.dirname(os.path.abspath(name)) for name in names])
