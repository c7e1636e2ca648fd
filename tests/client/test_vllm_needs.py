"""The lists of what the adapter needs of vLLM have every name that its code uses, and the record of them is current.

Read from the source, so that it needs no vLLM. tests/vllm/test_interface.py compares with the installed one.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from histospec.client.vllm import releases
from histospec.client.vllm.needs import SCHEDULER
from histospec.client.vllm.patches import PATCHES
from scripts import vllm_versions
from scripts.vllm_bodies import READ
from scripts.vllm_versions import BEGIN, END, PAGE, RELEASES, Record, wanted, written

ROOT = Path(__file__).parents[2]
LISTS = ("interface.py", "needs.py", "releases.py")
ADAPTER = [path for path in sorted((ROOT / "client/vllm").rglob("*.py")) if path.name not in LISTS]
OF_VLLM = [*ADAPTER, ROOT / "client/rollouts/sampling.py"]
PLAIN = frozenset(
    ["device", "dtype", "initial_seed", "is_cuda", "long", "new_empty", "new_full", "new_zeros", "shape", "to",
     "tolist", "append", "endswith", "fullmatch", "get", "rpartition", "setdefault", "split", "startswith",
     "synchronize", "update"]
)  # fmt: skip
"""Attributes of tensors and of Python's own types, which vLLM's objects hold."""


def constants(tree: ast.Module) -> dict[str, str]:
    """Texts that a module names."""
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


class Names:
    """The names in a part of a module that stand for modules of vLLM and for what is in them."""

    def __init__(self, part: ast.AST, texts: dict[str, str], known: dict[str, str]) -> None:
        self.texts = texts
        self.known = dict(known)
        for node in ast.walk(part):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                self.known |= {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}
        before = -1
        while before != len(self.known):
            before = len(self.known)
            for node in ast.walk(part):
                if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                    symbol = self.symbol(node.value)
                    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                        if symbol is not None and isinstance(target, ast.Name):
                            self.known[target.id] = symbol

    def returned(self, function: ast.FunctionDef) -> str | None:
        """What of vLLM a function returns."""
        values = [node.value for node in function.body if isinstance(node, ast.Return) and node.value]
        return self.symbol(values[0]) if values else None

    def symbol(self, node: ast.expr) -> str | None:
        """What of vLLM an expression is, such as `vllm.v1.request:Request.status`; `vllm.v1.request:` is a module."""
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        if isinstance(node, ast.Attribute):
            return self._within(self.symbol(node.value), node.attr)
        if not isinstance(node, ast.Call):
            return None
        called = ast.unparse(node.func)
        if called.endswith("import_module") and (name := self.text(node.args[0])) and name.split(".")[0] == "vllm":
            return f"{name}:"
        if called in ("getattr", "replace", "is_replaced") and len(node.args) > 1 and (name := self.text(node.args[1])):
            return self._within(self.symbol(node.args[0]), name)
        return self.known.get(f"{called}()")

    def text(self, node: ast.expr) -> str | None:
        """The value of an expression that is a text."""
        if isinstance(node, ast.Name):
            return self.texts.get(node.id)
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None

    @staticmethod
    def _within(owner: str | None, name: str) -> str | None:
        return owner and owner + ("" if owner.endswith(":") else ".") + name


def used(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """What a module uses of vLLM's modules, by line."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    outside = ast.Module([node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)], [])
    around = Names(outside, constants(tree), {})
    known = around.known | {f"{f.name}()": symbol for f in functions if (symbol := around.returned(f))}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from ((node.lineno, f"{node.module}:{alias.name}") for alias in node.names)
    for part in (outside, *functions):
        names = Names(part, around.texts, known)
        for node in ast.walk(part):
            if isinstance(node, ast.expr) and (symbol := names.symbol(node)) and not symbol.endswith(":"):
                yield node.lineno, symbol


def read(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Attributes that a module reads of parameters with the type Any, which are vLLM's objects, by line."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        theirs = {each.arg for each in given if each.annotation and ast.unparse(each.annotation) == "Any"}
        before = -1
        while before != len(theirs):
            before = len(theirs)
            for node in ast.walk(function):
                if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and of(node.value, theirs):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    theirs |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and of(node.value, theirs):
                yield node.lineno, node.attr
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and of(node.args[0], theirs):
                yield from ((node.lineno, str(a.value)) for a in node.args[1:2] if isinstance(a, ast.Constant))


def of(node: ast.expr, names: set[str]) -> bool:
    """Whether an expression is one of these names, or an attribute, an item or a result of one."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return isinstance(node, ast.Name) and node.id in names


def unlisted(tree: ast.Module, symbols: frozenset[str]) -> Iterator[tuple[int, str]]:
    """What a module uses of vLLM that no list has, by line."""
    attributes = {symbol.rpartition(".")[2] for symbol in symbols} | PLAIN
    for line, symbol in used(tree):
        module, _, path = symbol.partition(":")
        known = [
            i for i in range(1, 1 + len(path.split("."))) if f"{module}:{'.'.join(path.split('.')[:i])}" in symbols
        ]
        rest = path.split(".")[known[-1] :] if known else [path]
        wrong = [name for name in rest if not known or (name not in attributes and not name.startswith("__"))]
        yield from ((line, symbol) for _ in wrong[:1])
    for line, name in read(tree):
        if name not in attributes and not name.startswith("_"):
            yield line, name


SYMBOLS = frozenset(wanted()) | {symbol.rpartition(".")[0] for symbol in wanted() if ":" in symbol.rpartition(".")[0]}


def test_every_name_of_vllm_is_listed() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in OF_VLLM
        for line, name in unlisted(ast.parse(path.read_text()), SYMBOLS)
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "from vllm.v1.engine.core import Another",
        "c: Any = importlib.import_module('vllm.v1.engine.core').EngineCore\nc.another_method()",
        "NAME = 'another_name'\nc = importlib.import_module('vllm.v1.engine.core')\nf = getattr(c, NAME, None)",
        "def _runner(): return importlib.import_module('vllm.v1.other').Runner\nreplace(_runner(), 'run', f)",
        "def forward(self: Any, metadata: Any):\n    batch = metadata.sampling[0]\n    return batch",
        "def check(config: Any):\n    return getattr(config.parallel_config, 'another_size', 1)",
    ],
)
def test_an_unlisted_name_is_found(source: str) -> None:
    assert list(unlisted(ast.parse(source), SYMBOLS))


def test_every_patch_is_compared_by_its_signature_and_its_body() -> None:
    newest = Record.load().found[RELEASES[-1]]
    for patch in PATCHES:
        want, fact = wanted()[patch.symbol], newest[patch.symbol]
        assert want.body, patch.symbol
        assert fact is not None, patch.symbol
        # An attribute that a class sets when it is made has neither; NEEDS has the functions behind it.
        assert fact.body is None or want.begins, patch.symbol


def test_the_parameters_that_patches_demand_are_listed() -> None:
    demanded = [
        tuple(ast.literal_eval(node))
        for path in (ROOT / "client/vllm/patches").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.List) and node.elts and all(isinstance(each, ast.Constant) for each in node.elts)
    ]
    assert len(demanded) > 4
    listed = {want.begins for want in wanted().values()}
    assert [each for each in demanded if each not in listed and ("self", *each) not in listed] == []


def test_the_record_has_every_release_and_every_name() -> None:
    record = Record.load()
    assert list(record.found) == list(RELEASES)
    present = {symbol for found in record.found.values() for symbol, fact in found.items() if fact is not None}
    assert present == set(wanted())


def test_the_lists_of_releases_are_those_of_the_record() -> None:
    record = Record.load()
    assert [version for version in releases.TESTED if not record.verdict(version).agrees] == []
    read = [v for v in record.found if v not in releases.TESTED and record.verdict(v).agrees]
    assert tuple(read) == releases.AGREE
    assert set(releases.TESTED_WITH_V2) <= set(releases.AGREE)


def test_tested_releases_are_those_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    said = re.findall(r"^VLLM_(?:OLD|MID|NEW) := (\S+)", makefile, re.MULTILINE)
    assert sorted(said) == sorted(releases.TESTED)
    assert tuple(re.findall(r"^VLLM_NEXT := (\S+)", makefile, re.MULTILINE)) == releases.TESTED_WITH_V2


def test_the_page_has_the_table_of_the_record() -> None:
    page = PAGE.read_text()
    assert BEGIN in page
    assert END in page
    assert written(page, Record.load().text()) == page


def test_every_body_that_was_read_is_one_of_a_release() -> None:
    record = Record.load()
    for symbol, bodies in READ.items():
        found = {fact.body for release in record.found.values() if (fact := release[symbol]) is not None}
        assert set(bodies) <= found, symbol


def test_an_unread_body_is_no_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record.load()
    symbol = f"{SCHEDULER}._update_request_with_output"
    assert record.verdict(RELEASES[-1]).agrees
    monkeypatch.setattr(vllm_versions, "READ", {})
    verdict = record.verdict(RELEASES[-1])
    assert not verdict.agrees
    assert symbol in verdict.unread
