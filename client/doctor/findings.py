"""What a check found."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Literal

Level = Literal["ok", "warn", "bad"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    """ok; warn: odd, and perhaps meant; bad: drafts or responses are lost."""
    check: str
    """What was looked at, in one word."""
    text: str
    advice: str = ""
    """What to do; empty where there is nothing to do."""
    shard: str = ""
    """Of which shard it is said; empty: of all."""

    def as_json(self) -> dict[str, str]:
        """For `--json`."""
        return asdict(self)


def ok(check: str, text: str, shard: str = "") -> Finding:
    """As it should be."""
    return Finding("ok", check, text, "", shard)


def warn(check: str, text: str, advice: str, shard: str = "") -> Finding:
    """Odd, and perhaps meant."""
    return Finding("warn", check, text, advice, shard)


def bad(check: str, text: str, advice: str, shard: str = "") -> Finding:
    """Drafts or responses are lost."""
    return Finding("bad", check, text, advice, shard)


def merged(findings: Iterable[Finding], shards: int) -> list[Finding]:
    """The same, but what is said of every shard is said once."""
    out: list[Finding] = []
    found = list(findings)
    for finding in found:
        alike = [one for one in found if replace(one, shard=finding.shard) == finding]
        finding = replace(finding, shard="") if len(alike) == shards else finding
        if finding not in out:
            out.append(finding)
    return out


def counted(number: int, what: str) -> str:
    """`1 problem`, `2 problems`."""
    return f"{number} {what}{'' if number == 1 else 's'}"
