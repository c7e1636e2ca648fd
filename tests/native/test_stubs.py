"""The hand-written stub agrees with the compiled module. Takes about 15 s."""

import ast
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from histospec import native

ROOT = Path(__file__).parents[2]
STUB = ast.parse(Path(native.__file__).with_name("_core.pyi").read_text())
METHODS = {
    node.name: node
    for scope in STUB.body
    if isinstance(scope, ast.ClassDef) and scope.name == "Engine"
    for node in scope.body
    if isinstance(node, ast.FunctionDef)  # the last overload, which has the documentation
}


@pytest.mark.long
def test_stubtest_finds_no_difference() -> None:
    command = [sys.executable, "-m", "mypy.stubtest", "--mypy-config-file", "pyproject.toml"]
    command += ["--allowlist", "tests/native/stubtest_allowlist.txt", "histospec.native._core"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr


def arguments(function: ast.FunctionDef) -> list[tuple[str, str, object]]:
    """Returns name, kind and default of each argument."""
    names = function.args
    without = [None] * (len(names.args) - len(names.defaults))
    plain = [(a.arg, "plain", value(d)) for a, d in zip(names.args, [*without, *names.defaults], strict=True)]
    return plain + [(a.arg, "keyword", value(d)) for a, d in zip(names.kwonlyargs, names.kw_defaults, strict=True)]


def value(default: ast.expr | None) -> object:
    if default is None:
        return "required"
    literal = ast.literal_eval(default)
    return round(literal, 6) if isinstance(literal, float) else literal  # verify_cost is a float32


@pytest.mark.parametrize("name", METHODS)
def test_the_arguments_are_those_of_the_binding(name: str) -> None:
    # stubtest cannot see them: pybind11 writes signatures in docstrings only.
    signature = getattr(native.Engine, name).__doc__.strip().splitlines()[0]
    binding = ast.parse(f"def {signature.replace('->', '-> ')}: ...").body[0]
    assert isinstance(binding, ast.FunctionDef)
    assert arguments(binding) == arguments(METHODS[name])
    assert ast.get_docstring(METHODS[name]) or name == "__init__"


@pytest.mark.parametrize("name", ["_NamespaceStats", "_Stats", "_LockTimes", "_SourceStats"])
def test_the_keys_of_a_dictionary_are_those_of_the_stub(name: str) -> None:
    (stub,) = (node for node in STUB.body if isinstance(node, ast.ClassDef) and node.name == name)
    engine = native.Engine(1 << 20)
    engine.ingest("run", [1], [[2]])
    stats = engine.stats()
    (namespace,) = stats["namespaces"].values()
    given: dict[str, Sequence[Mapping[str, object]]] = {
        "_NamespaceStats": [namespace],
        "_Stats": [stats],
        "_LockTimes": [engine.lock_times()],
        "_SourceStats": [*namespace["sources"].values(), *namespace["ages"].values()],
    }
    keys = {
        node.target.id for node in stub.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert all(dictionary.keys() == keys for dictionary in given[name])
