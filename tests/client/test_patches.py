"""vLLM is changed in one folder only, client/vllm/patches/, and its table names every change.

Read from the source, so that it needs no vLLM. tests/vllm/test_patches.py compares the table with vLLM itself.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from histospec.client.vllm.patches import PATCHES

ROOT = Path(__file__).parents[2]
PATCHES_FOLDER = ROOT / "client/vllm/patches"
OURS = ("client", "server", "replay", "examples", "benchmarks")


def of_vllm(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == "vllm"


def is_of_vllm(node: ast.expr, names: set[str]) -> bool:
    """Returns whether an expression is a module or class of vLLM, or an attribute of one."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    if isinstance(node, ast.Name):
        return node.id in names
    if not (isinstance(node, ast.Call) and node.args):
        return False
    called, first = ast.unparse(node.func).rpartition(".")[2], node.args[0]
    if called in ("import_module", "__import__"):
        return isinstance(first, ast.Constant) and isinstance(first.value, str) and of_vllm(first.value)
    return called in ("getattr", "vars") and is_of_vllm(first, names)


def names_of_vllm(tree: ast.Module, interface: bool) -> set[str]:
    """Names that stand for modules or classes of vLLM's anywhere in a module.

    interface: whether the module's neighbour `interface` holds classes of vLLM's.
    """
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or "vllm" for alias in node.names if of_vllm(alias.name)}
        elif isinstance(node, ast.ImportFrom) and (of_vllm(node.module) or (interface and node.module == "interface")):
            names |= {alias.asname or alias.name for alias in node.names}
    before = -1
    while before != len(names):
        before = len(names)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if is_of_vllm(node.value, names):
                    names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def changes(tree: ast.Module, interface: bool = True) -> Iterator[int]:
    """Returns the lines that assign to, or delete, attributes of vLLM."""
    names = names_of_vllm(tree, interface)
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr", "replace") and node.args:
            targets = [ast.Attribute(node.args[0], "any")]
        for part in (part for target in targets for part in ast.walk(target)):
            if isinstance(part, ast.Attribute | ast.Subscript) and is_of_vllm(part, names):
                yield line


def test_only_one_folder_changes_vllm() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for folder in OURS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if PATCHES_FOLDER not in path.parents
        for line in changes(ast.parse(path.read_text()), interface=ROOT / "client/vllm" in path.parents)
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import vllm\nvllm.LLM = None",
        "import vllm.v1.request as r\nr.Request.is_finished = f",
        "from vllm.v1.request import Request\nsetattr(Request, name, f)",
        "from .interface import Scheduler\nScheduler.schedule = f",
        "from vllm import envs\nenvs.variables['A'] = f",
        "from vllm import envs\ndel envs.A",
        "import importlib\nc: Any = importlib.import_module('vllm.v1.engine.core').EngineCore\nc.run = f",
        "s = getattr(import_module('vllm.v1'), 'S', None)\nforward = s.f\ns.f, x = f, 1",
        "from importlib import import_module\nimport_module('vllm.v1').x = 1",
        "from vllm import LLM\nreplace(LLM, 'generate', f)",
    ],
)
def test_a_change_is_found(source: str) -> None:
    assert list(changes(ast.parse(source)))


def test_the_table_has_a_row_for_every_replacement() -> None:
    calls = Counter(
        path.stem
        for path in PATCHES_FOLDER.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "replace"
    )
    assert calls == Counter(patch.room for patch in PATCHES)


def own(tree: ast.Module) -> set[ast.AST]:
    """Everything in the constructors of the module's own classes."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    made = [one for each in classes for one in each.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    return {node for constructor in made for node in ast.walk(constructor)}


def test_patches_change_vllm_through_replace_alone() -> None:
    found = [
        f"{path.name}:{node.lineno}"
        for path in PATCHES_FOLDER.glob("*.py")
        for tree in [ast.parse(path.read_text())]
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del) and node not in own(tree))
        or (isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"))
    ]
    assert [where.split(":")[0] for where in found] == ["replacing.py"] * 5
