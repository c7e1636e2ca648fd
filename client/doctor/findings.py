"""The findings of checks."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Literal

Level = Literal["ok", "warn", "bad"]


@dataclass(frozen=True)
class Finding:
    """One finding of a check."""

    level: Level
    """ok; warn: unusual, and perhaps intended; bad: drafts or responses are lost."""
    check: str
    """The subject of the check, in one word."""
    text: str
    advice: str = ""
    """What to do; empty if there is nothing to do."""
    shard: str = ""
    """The shard that it is about; empty: all shards."""

    def as_json(self) -> dict[str, str]:
        """Returns the fields for `--json`."""
        return asdict(self)


def ok(check: str, text: str, shard: str = "") -> Finding:
    """Returns a finding without a problem."""
    return Finding("ok", check, text, "", shard)


def warn(check: str, text: str, advice: str, shard: str = "") -> Finding:
    """Returns a finding that is unusual, and perhaps intended."""
    return Finding("warn", check, text, advice, shard)


def bad(check: str, text: str, advice: str, shard: str = "") -> Finding:
    """Returns a finding that costs drafts or responses."""
    return Finding("bad", check, text, advice, shard)


def merged(findings: Iterable[Finding], shards: int) -> list[Finding]:
    """Returns the findings, with one finding in place of equal ones about every shard."""
    out: list[Finding] = []
    found = list(findings)
    for finding in found:
        alike = [one for one in found if replace(one, shard=finding.shard) == finding]
        finding = replace(finding, shard="") if len(alike) == shards else finding
        if finding not in out:
            out.append(finding)
    return out


def counted(number: int, what: str) -> str:
    """Returns a number with its noun: `1 problem`, `2 problems`."""
    return f"{number} {what}{'' if number == 1 else 's'}"
