"""Prints findings as text of 80 columns, or as JSON."""

import json
import textwrap
from collections.abc import Sequence

from histospec.client.doctor.facts import Facts
from histospec.client.doctor.findings import Finding, counted

COLUMNS = 80
MARKS = {"ok": "ok", "warn": "warn", "bad": "BAD"}
INDENT = 17


def judged(findings: Sequence[Finding]) -> str:
    """Returns a summary in one sentence."""
    numbers = {level: sum(finding.level == level for finding in findings) for level in MARKS}
    if numbers["bad"]:
        more = f", {counted(numbers['warn'], 'warning')}" if numbers["warn"] else ""
        return f"{counted(numbers['bad'], 'problem')}{more}. Follow the arrows from the top, then run it again."
    if numbers["warn"]:
        return f"No problem found, {counted(numbers['warn'], 'warning')}."
    return "No problem found."


def text(facts: Facts, findings: Sequence[Finding]) -> str:
    """Returns the report as text."""
    lines = [f"{_endpoints(facts)}, namespace {facts.config.namespace!r}", ""]
    for finding in findings:
        start = f"  {MARKS[finding.level]:4}  {finding.check:9}  "
        said = f"{finding.shard}: {finding.text}" if finding.shard and len(facts.shards) > 1 else finding.text
        lines += _wrapped(start, said)
        if finding.advice:
            lines += _wrapped(" " * INDENT + "-> ", finding.advice)
    return "\n".join([*lines, "", judged(findings), ""])


def as_json(facts: Facts, findings: Sequence[Finding]) -> str:
    """Returns the report as JSON."""
    told = {
        "endpoint": _endpoints(facts),
        "namespace": facts.config.namespace,
        "client": facts.version,
        "healthy": not any(finding.level == "bad" for finding in findings),
        "findings": [finding.as_json() for finding in findings],
    }
    return json.dumps(told, indent=1) + "\n"


def _endpoints(facts: Facts) -> str:
    listed = ",".join(e.address if e.name == e.address else f"{e.name}={e.address}" for e in facts.config.endpoints)
    return f"discover://{listed}" if facts.config.discover else listed


def _wrapped(start: str, said: str) -> list[str]:
    """Wraps a text at COLUMNS, and replaces control characters, which a namespace may contain."""
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in said)
    return textwrap.wrap(
        shown,
        COLUMNS,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )
