"""Imports point one way: a room imports from those before it, never from those behind (docs/design.md, "Rooms").

Imports for type checking count, imports inside functions count, and so do C++ includes.
"""

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "histospec.client": ROOT / "client",
    "histospec.native": ROOT / "native/python",
    "histospec.protocol": ROOT / "protos/histospec/protocol",
    "histospec.replay": ROOT / "replay",
    "histospec.server": ROOT / "server",
}

WIRE = ["histospec.v1", "histospec.specrl", "histospec.protocol"]
SERVER = [
    "histospec.native",
    "histospec.server.errors",
    "histospec.server.process",
    "histospec.server.machine",
    "histospec.server.arguments",
    "histospec.server.threads",
    "histospec.server.logs",
    "histospec.server.security",
    "histospec.server.output_file",
    "histospec.server.stores",
    "histospec.server.settings.addresses",
    "histospec.server.settings.budget",
    "histospec.server.settings.config",
    "histospec.server.settings.options",
    "histospec.server.open_store",
    "histospec.server.history",
    "histospec.server.observability",
    "histospec.server.rpc",
    "histospec.server.app",
]
CLIENT = [
    "histospec.client.errors",
    "histospec.client.quiet_grpc",
    "histospec.client.values",
    "histospec.client.arguments",
    "histospec.client.signatures",
    "histospec.client.config",
    "histospec.client.seeds",
    "histospec.client.recorder",
    "histospec.client.core",
    "histospec.client.transport",
    "histospec.client.sync",
    "histospec.client.aio",
    "histospec.client",  # the public names
    "histospec.client.engines",
    "histospec.client.rollouts",
    "histospec.client.vllm",
    "histospec.client.sglang",
    "histospec.client.verl",
    "histospec.client.doctor",
]
"""In each row, a room may import from those before it."""


def in_a_row(rooms: list[str]) -> dict[str, list[str]]:
    return {room: [*WIRE, *rooms[:number]] for number, room in enumerate(rooms)}


ROOMS = {
    **{room: [] for room in WIRE},
    **in_a_row(SERVER),
    **in_a_row(CLIENT),
    "histospec.replay": [*WIRE, *SERVER[: SERVER.index("histospec.server.settings.addresses")]],
    "histospec.server.commands": [*WIRE, *CLIENT, *SERVER[:-1], "histospec.replay"],
    "histospec.server.cli": [*WIRE, *SERVER[: SERVER.index("histospec.server.arguments")]],
    "histospec.server.__main__": ["histospec.server.cli"],
}
"""What each room may import from, beside itself."""


def sources() -> Iterator[tuple[str, Path]]:
    for package, folder in PACKAGES.items():
        for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.pyi")]):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join([package, *(part for part in parts if part != "__init__")]), path


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """What a module imports of ours, by line, as the full name of a module or of something in one.

    Imports are absolute: ruff refuses others.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def room_of(name: str) -> str:
    """The innermost room that a module, or what it holds, stands in."""
    return max((room for room in ROOMS if f"{name}.".startswith(f"{room}.")), key=len, default="no room")


def wrong(found: list[tuple[str, str, str]]) -> list[str]:
    """What does not point the right way, of `(importer, where, imported)`."""
    return [
        f"{where}: {importer} imports {imported}"
        for importer, where, imported in found
        if room_of(imported) not in [room_of(importer), *ROOMS.get(room_of(importer), [])]
    ]


def arrows() -> list[tuple[str, str, str]]:
    return [
        (module, f"{path.relative_to(ROOT)}:{line}", name)
        for module, path in sources()
        for line, name in imports(path)
        if name.startswith("histospec.")
    ]


def test_imports_point_one_way() -> None:
    assert wrong(arrows()) == []


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("histospec.client.sync", "histospec.server.errors.HistoSpecError"),
        ("histospec.server.rpc.service", "histospec.client.DraftClient"),
        ("histospec.server.stores.records", "histospec.server.rpc.wire"),
        ("histospec.server.history.history", "histospec.server.rpc.service"),
        ("histospec.replay.plan", "histospec.server.app"),
        ("histospec.protocol.limits", "histospec.client"),
        ("histospec.client.core.shard", "histospec.client.transport.stream"),
        ("histospec.client.vllm.scheduler", "histospec.client.verl.worker"),
        ("histospec.somewhere.new", "histospec.client.errors"),
    ],
)
def test_an_arrow_that_is_turned_is_found(importer: str, imported: str) -> None:
    assert wrong([(importer, "x.py:1", imported)])


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {module for module, _ in sources()}

    def module_of(name: str) -> str | None:
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name or None

    ahead: dict[str, set[str]] = {}
    for importer, _, imported in arrows():
        target = module_of(imported)
        if target is not None and target != importer and not importer.startswith(target + "."):
            ahead.setdefault(importer, set()).add(target)
    check_no_circle(ahead)


def check_no_circle(ahead: Mapping[str, Collection[str]]) -> None:
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for target in sorted(ahead.get(name, ())):
                walk(target, (*path, name))
            done.add(name)

    for name in sorted(ahead):
        walk(name, ())


# The rooms of the core, and the public headers by the first room that may include them.
FOLDERS = ["hash", "threads", "index", "live", "draft", "registry", "upkeep", "engine"]
HEADERS = {
    "histospec/types.h": "hash",
    "histospec/stats.h": "registry",
    "histospec/options.h": "upkeep",
    "histospec/engine.h": "engine",
}


def included() -> dict[str, list[str]]:
    """Returns what each file of the core includes, as paths below `native/src` or `native/include`."""
    return {
        path.relative_to(folder).as_posix(): re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)
        for folder in (ROOT / "native/src", ROOT / "native/include")
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def turned_includes(files: Mapping[str, list[str]]) -> list[str]:
    def rank(file: str) -> int:
        return FOLDERS.index(HEADERS.get(file) or file.split("/")[0])

    return [f"{file}: {name}" for file, names in files.items() for name in names if rank(name) > rank(file)]


def test_includes_point_one_way() -> None:
    assert {path.name for path in (ROOT / "native/src").iterdir()} == set(FOLDERS)
    files = included()
    assert {file for file in files if file.startswith("histospec/")} == HEADERS.keys()
    assert {name for names in files.values() for name in names} <= files.keys()
    assert turned_includes(files) == []
    check_no_circle(files)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("index/segment.h", "draft/drafter.h"),
        ("registry/monitor.h", "histospec/engine.h"),
        ("draft/evidence.h", "histospec/stats.h"),
        ("histospec/stats.h", "histospec/engine.h"),
    ],
)
def test_an_include_that_is_turned_is_found(file: str, name: str) -> None:
    assert turned_includes({file: [name]})
