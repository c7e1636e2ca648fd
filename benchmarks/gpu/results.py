"""The results, in one JSON file per part, which is complete after every measurement."""

import json
import os
import platform
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""A measurement as in JSON."""
Key = dict[str, str | int]
"""What was measured."""


class Results:
    """The measurements of one part. Raises ValueError if the file has measurements of another scale."""

    def __init__(self, folder: Path, part: str, dry: bool) -> None:
        self.path = folder / f"{part}.json"
        self.rows: list[Row] = []
        self._head: Row = {"part": part, "dry": dry}
        if self.path.exists():
            stored = json.loads(self.path.read_text())
            if stored["dry"] != dry:
                raise ValueError(f"{self.path}: made with{'' if stored['dry'] else 'out'} --dry; name another --out")
            self.rows = stored["measurements"]

    def has(self, **key: str | int) -> bool:
        """Returns whether there is a measurement with these values."""
        return self.find(**key) is not None

    def find(self, **key: str | int) -> Row | None:
        """Returns the first measurement with these values."""
        return next((row for row in self.rows if key.items() <= row.items()), None)

    def add(self, key: Key, values: Row) -> None:
        """Adds a measurement, or replaces an earlier one with the same key."""
        self.rows = [row for row in self.rows if not key.items() <= row.items()]
        self.rows.append(key | values | {"machine": machine()})
        text = json.dumps(self._head | {"measurements": self.rows}, indent=1)
        draft = self.path.with_suffix(".new")
        draft.write_text(text)
        os.replace(draft, self.path)


def machine() -> str:
    """Returns the device and the versions that figures depend on."""
    import torch
    import vllm

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    return f"{device}, vllm {vllm.__version__}, torch {torch.__version__}"
