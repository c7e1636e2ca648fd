"""Takes the place of torchvision, which brings another torch. SGLang imports it for images; no test has any."""

import enum
import sys
import types
from typing import Any

__version__ = "0.28.0"

InterpolationMode = enum.Enum("InterpolationMode", "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS")


class _Part(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return InterpolationMode if name == "InterpolationMode" else type(name, (), {})


for _name in ("io", "ops", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    _part = sys.modules[f"torchvision.{_name}"] = _Part(f"torchvision.{_name}")
    _parent, _, _last = f"torchvision.{_name}".rpartition(".")
    setattr(sys.modules[_parent], _last, _part)
