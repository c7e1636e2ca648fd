"""Reads Python sources of vLLM, of any version, without importing them: which names exist, with which signatures.

The sources are a folder that holds `vllm/`, or a wheel. A name is `module:qualified name`, as in client/vllm/needs.py.
"""

import ast
import hashlib
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef
DIGITS = 12  # of a digest, which compares a few versions of one function


class Found(NamedTuple):
    """A name that exists.

    Attributes:
        parameters: the parameters of a function as source text, with `...` for each default; None for other names.
        body: digest of a function's normalised body; None for other names.
    """

    parameters: str | None = None
    body: str | None = None


class Sources:
    """The sources of one vLLM."""

    def __init__(self, path: Path) -> None:
        """Takes a folder with `vllm/` in it, or a wheel. Raises FileNotFoundError if it is neither."""
        self._wheel = zipfile.ZipFile(path) if path.is_file() else None
        self._folder = path
        self._names = set(self._wheel.namelist()) if self._wheel is not None else None
        if self._file("vllm") is None:
            raise FileNotFoundError(f"{path}: expected a wheel or a folder with vllm/__init__.py")
        self.module = cache(self._module)

    def look(self, symbol: str) -> Found | None:
        """Returns what a name is; None if it does not exist."""
        module, _, path = symbol.partition(":")
        *owners, name = path.split(".")
        if not owners:
            nodes = self._in_module(module, name)
        else:
            nodes = [
                found
                for where, owner in self._in_module(module, owners[0])
                if isinstance(owner, ast.ClassDef)
                for found in self._in_class(where, owner, name)
            ]
        for _, node in nodes:
            if isinstance(node, Function):
                return Found(parameters(node), digest(node))
            return Found()
        return None

    def requirement(self, package: str) -> str | None:
        """Returns the version of a package that the wheel requires exactly; None if it says none."""
        for name in self._names or (str(p.relative_to(self._folder)) for p in self._folder.glob("*.dist-info/*")):
            if name.endswith(".dist-info/METADATA"):
                for line in self._text(name).split("\n\n")[0].splitlines():
                    if line.startswith((f"Requires-Dist: {package}==", f"Requires-Dist: {package} (==")):
                        return line.partition("==")[2].split(";")[0].split("+")[0].strip(" )")
        return None

    def _in_module(self, module: str, name: str) -> list[tuple[str, ast.AST]]:
        """Returns the statements that bind a name in a module, each with its module. Follows imports from vLLM."""
        tree = self.module(module)
        if tree is None:
            return []
        found: list[tuple[str, ast.AST]] = []
        for node in _statements(tree.body):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        found += self._imported(module, node, alias.name)
            elif name in _bound(node):
                found.append((module, node))
        return found

    def _imported(self, module: str, node: ast.ImportFrom, name: str) -> list[tuple[str, ast.AST]]:
        origin = node.module or ""
        if node.level:
            above = module.split(".")
            keep = len(above) - node.level + (self._file(module) or "").endswith("__init__.py")
            origin = ".".join([*above[:keep], *([origin] if origin else [])])
        if origin.split(".")[0] != "vllm":
            return [(module, node)]
        return self._in_module(origin, name)

    def _in_class(self, module: str, owner: ast.ClassDef, name: str) -> Iterator[tuple[str, ast.AST]]:
        """Yields the statements that bind an attribute of a class, first its own, then those of its bases."""
        for node in _statements(owner.body):
            if name in _bound(node):
                yield module, node
        for method in owner.body:
            if isinstance(method, Function):
                yield from ((module, node) for node in ast.walk(method) if _is_own(node, name))
        for base in owner.bases:
            text = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            for where, node in self._in_module(module, text):
                if isinstance(node, ast.ClassDef) and node is not owner:
                    yield from self._in_class(where, node, name)

    def _module(self, module: str) -> ast.Module | None:
        file = self._file(module)
        return None if file is None else ast.parse(self._text(file), file)

    def _file(self, module: str) -> str | None:
        path = module.replace(".", "/")
        return next((file for file in (f"{path}.py", f"{path}/__init__.py") if self._has(file)), None)

    def _has(self, file: str) -> bool:
        return (self._folder / file).is_file() if self._names is None else file in self._names

    def _text(self, file: str) -> str:
        raw = (self._folder / file).read_bytes() if self._wheel is None else self._wheel.read(file)
        return raw.decode()


def parameters(function: Function) -> str:
    """Returns the parameters of a function as source text, without annotations, with `...` for each default."""
    arguments = function.args
    for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if each is not None:
            each.annotation = None
    arguments.defaults = [ast.Constant(...) for _ in arguments.defaults]
    arguments.kw_defaults = [None if default is None else ast.Constant(...) for default in arguments.kw_defaults]
    return ast.unparse(arguments)


def digest(function: Function) -> str:
    """Returns a digest of what a function does: comments, docstrings, annotations and log calls do not count."""
    text = "\n".join(_normalised(statement) for statement in _done(function.body))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def _done(body: list[ast.stmt]) -> list[ast.stmt]:
    return [statement for statement in body if not _says(statement)]


def _says(statement: object) -> bool:
    """Returns whether a statement does nothing but say something: a docstring, a declaration, a call of a logger."""
    if isinstance(statement, ast.AnnAssign):
        return statement.value is None
    if not isinstance(statement, ast.Expr):
        return False
    value = statement.value
    return isinstance(value, ast.Constant) or (
        isinstance(value, ast.Call) and ast.unparse(value.func).startswith("logger.")
    )


def _normalised(node: object) -> str:
    """Returns the syntax of a node, the same in every Python: without positions, contexts and empty fields."""
    if isinstance(node, list):
        return f"[{','.join(map(_normalised, _done(node)))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        node = ast.Assign([node.target], node.value)
    fields = (
        f"{name}={_normalised(value)}"
        for name, value in sorted(ast.iter_fields(node))
        if name not in ("annotation", "returns", "ctx", "kind", "type_comment", "type_params")
        and value is not None
        and value != []
    )
    return f"{type(node).__name__}({','.join(fields)})"


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements of a module or class, also those inside conditions and `try`."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _statements(getattr(node, inner, []))
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                yield from _statements(handler.body)


def _bound(node: ast.AST) -> set[str]:
    """Returns the names that a statement binds, imports aside."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


def _is_own(node: ast.AST, name: str) -> bool:
    """Returns whether a node is the target `self.name` of an assignment."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )
