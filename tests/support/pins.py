"""Reads requirements/*.txt, which `make lock` writes."""

import re
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def pins(file: Path) -> dict[str, tuple[Requirement, list[str]]]:
    """The requirements of a file by name, each with its hashes."""
    text = re.sub(r"^\s*#.*$", "", file.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, tuple[Requirement, list[str]]] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        words, *hashes = re.split(r"\s+--hash=", line)
        requirement = Requirement(words)
        found[canonicalize_name(requirement.name)] = (requirement, hashes)
    return found


def version(requirement: Requirement) -> str:
    """The one version that a pinned requirement allows."""
    (pinned,) = requirement.specifier
    assert pinned.operator == "==", requirement
    return pinned.version
