"""The findings of checks, and the report: text of 80 columns, or JSON."""

import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from histospec.client.doctor.facts import Facts

COLUMNS = 80
MARKS = {"ok": "ok", "warn": "warn", "bad": "BAD"}
INDENT = 17

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


def judged(findings: Sequence[Finding]) -> str:
    """Returns a summary in one sentence."""
    numbers = {level: sum(finding.level == level for finding in findings) for level in MARKS}
    if numbers["bad"]:
        more = f", {counted(numbers['warn'], 'warning')}" if numbers["warn"] else ""
        return f"{counted(numbers['bad'], 'problem')}{more}. Follow the arrows from the top, then run it again."
    if numbers["warn"]:
        return f"No problem found, {counted(numbers['warn'], 'warning')}."
    return "No problem found."


def as_text(facts: Facts, findings: Sequence[Finding]) -> str:
    """Returns the report as text."""
    lines = [f"{_endpoints(facts)}, namespace {facts.config.namespace!r}", ""]
    for finding in findings:
        start = f"  {MARKS[finding.level]:4}  {finding.check:9}  "
        line = f"{finding.shard}: {finding.text}" if finding.shard and len(facts.shards) > 1 else finding.text
        lines += _wrapped(start, line)
        if finding.advice:
            lines += _wrapped(" " * INDENT + "-> ", finding.advice)
    return "\n".join([*lines, "", judged(findings), ""])


def as_json(facts: Facts, findings: Sequence[Finding]) -> str:
    """Returns the report as JSON."""
    report = {
        "endpoint": _endpoints(facts),
        "namespace": facts.config.namespace,
        "client": facts.version,
        "healthy": not any(finding.level == "bad" for finding in findings),
        "findings": [asdict(finding) for finding in findings],
    }
    return json.dumps(report, indent=1) + "\n"


def _endpoints(facts: Facts) -> str:
    listed = ",".join(e.address if e.name == e.address else f"{e.name}={e.address}" for e in facts.config.endpoints)
    return f"discover://{listed}" if facts.config.discover else listed


def _wrapped(start: str, line: str) -> list[str]:
    """Wraps a text at COLUMNS, and replaces control characters, which a namespace may contain."""
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line)
    return textwrap.wrap(
        shown,
        COLUMNS,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )
