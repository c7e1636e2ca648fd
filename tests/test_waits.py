"""No thread of a test waits without end: a timeout ends a test's main thread alone, and the run would wait on."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def endless_waits(source: str) -> set[int]:
    """Lines where something bound to `threading.Event()` is waited for without a limit, and barriers without one."""
    tree = ast.parse(source)
    events: set[str] = set()
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                pairs = zip(target.elts, node.value.elts, strict=True) if several else [(target, node.value)]  # type: ignore[attr-defined]
                events |= {last(name) for name, value in pairs if ast.unparse(value) == "threading.Event()"}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called, limited = node.func, bool(node.args or node.keywords)
        given = node.args[0] if len(node.args) == 1 else None  # as to asyncio.to_thread(event.wait)
        for method in (given, *(() if limited else (called,))):
            if isinstance(method, ast.Attribute) and method.attr == "wait" and last(method.value) in events:
                found.add(node.lineno)
        if ast.unparse(called) == "threading.Barrier" and not node.keywords:
            found.add(node.lineno)
    return found


def last(name: ast.expr) -> str:
    return name.attr if isinstance(name, ast.Attribute) else ast.unparse(name)


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("gate = threading.Event()\ngate.wait()", {2}),
        ("self.a, self.b = 1, threading.Event()\nlook(lambda: self.b.wait())", {2}),
        ("gate = threading.Event()\nasyncio.to_thread(gate.wait)", {2}),
        ("gate = threading.Event()\nasyncio.to_thread(gate.wait, 60)\ngate.wait(60)\ngate.wait(timeout=1)", set()),
        ("threading.Barrier(3)\nthreading.Barrier(3, timeout=60)", {1}),
        ("gate = Latch()\ngate.wait()\nserver.wait()", set()),
    ],
)
def test_endless_waits_are_found(source: str, lines: set[int]) -> None:
    assert endless_waits(source) == lines


def test_no_thread_waits_without_end() -> None:
    found = {
        (str(path.relative_to(TESTS)), line) for path in TESTS.rglob("*.py") for line in endless_waits(path.read_text())
    }
    assert not found, "use waiting.Latch, or a timeout"
