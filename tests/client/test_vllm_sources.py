"""The reader of vLLM's sources: how it finds names, and what counts as another body."""

import zipfile
from pathlib import Path
from typing import Any

import pytest

from scripts.vllm_sources import Found, Sources
from scripts.vllm_versions import Wanted, fits

FILES = {
    "vllm/__init__.py": "",
    "vllm/base.py": (
        "class Base:\n    kept: int\n    def __init__(self, first, second=1):\n        self.made, x = first, 2\n"
        "    def inherited(self, a, *, b=2): return a\n"
    ),
    "vllm/room/__init__.py": "from .inner import Public\nfrom ..base import Base as Renamed\nfrom torch import Tensor",
    "vllm/room/inner.py": (
        "from vllm.base import Base\nLIMIT: int = 3\ntry:\n    import fast\nexcept ImportError:\n    fast = None\n"
        "class Public(Base):\n    async def own(self): ...\n    if LIMIT:\n        chosen = True\n"
    ),
}


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return Sources(tmp_path)


@pytest.mark.parametrize(
    ("symbol", "parameters"),
    [
        ("vllm.base:Base.inherited", "self, a, *, b=..."),
        ("vllm.room:Public.inherited", "self, a, *, b=..."),
        ("vllm.room:Renamed.__init__", "self, first, second=..."),
        ("vllm.room.inner:Public.own", "self"),
    ],
)
def test_functions(sources: Sources, symbol: str, parameters: str) -> None:
    found = sources.look(symbol)
    assert found is not None
    assert found.parameters == parameters
    assert found.body is not None


@pytest.mark.parametrize(
    "symbol",
    [
        "vllm.room:Public",
        "vllm.room:Public.kept",
        "vllm.room:Public.made",
        "vllm.room:Public.chosen",
        "vllm.room:Tensor",
        "vllm.room.inner:LIMIT",
        "vllm.room.inner:fast",
    ],
)
def test_other_names(sources: Sources, symbol: str) -> None:
    assert sources.look(symbol) == Found()


@pytest.mark.parametrize(
    "symbol",
    [
        "vllm.base:Other",
        "vllm.base:Base.other",
        "vllm.nowhere:Base",
        "vllm.room:Public.LIMIT",
        "vllm.room:inner.Public",
    ],
)
def test_names_that_are_absent(sources: Sources, symbol: str) -> None:
    assert sources.look(symbol) is None


def test_a_wheel_is_read_as_it_is(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for name, text in FILES.items():
            file.writestr(name, text)
        about = "Name: vllm\nRequires-Dist: numpy\nRequires-Dist: torch==2.13.0; x\n\nRequires-Dist: torch==1\n"
        file.writestr("vllm-1.0.dist-info/METADATA", about)
    sources = Sources(wheel)
    assert sources.look("vllm.room:Public.made") == Found()
    assert sources.requirement("torch") == "2.13.0"
    assert sources.requirement("jax") is None


def test_a_folder_without_vllm_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"expected a wheel or a folder with vllm/__init__\.py"):
        Sources(tmp_path)


BODY = "def f(a, b=2):\n    if a:\n        return a + b\n    return None\n"


@pytest.mark.parametrize(
    ("text", "same"),
    [
        (BODY, True),
        (
            "def f(a: int, b=3) -> int:\n    'Says.'\n    if a:  # why\n        return (a + b)\n    return None\n",
            True,
        ),
        (
            "def f(a, b=2):\n    logger.info('x')\n    if a:\n        c: int\n        return a + b\n    return None\n",
            True,
        ),
        ("def f(a, b=2):\n    if not a:\n        return a + b\n    return None\n", False),
        ("def f(a, b=2):\n    if a:\n        return a - b\n    return None\n", False),
        ("def f(a, b=2):\n    log(a)\n    if a:\n        return a + b\n    return None\n", False),
    ],
)
def test_what_counts_as_another_body(tmp_path: Path, text: str, same: bool) -> None:
    def body(text: str) -> Any:
        (tmp_path / "vllm").mkdir(exist_ok=True)
        (tmp_path / "vllm/__init__.py").write_text(text)
        found = Sources(tmp_path).look("vllm:f")
        assert found is not None
        return found.body

    assert (body(text) == body(BODY)) is same


@pytest.mark.parametrize(
    ("want", "parameters", "fitting"),
    [
        (Wanted("x", begins=("a", "b")), "a, b, c=...", True),
        (Wanted("x", begins=("a", "b")), "b, a", False),
        (Wanted("x", begins=("a", "b")), "a", False),
        (Wanted("x", begins=("a",), exact=True), "a", True),
        (Wanted("x", begins=("a",), exact=True), "a, b=...", False),
        (Wanted("x", begins=("a",), exact=True), "a, **more", False),
        (Wanted("x", takes=("b", "c")), "a, b, *, c", True),
        (Wanted("x", takes=("b",)), "a, **more", True),
        (Wanted("x", takes=("b",)), "a", False),
        (Wanted("x", begins=("a",)), None, False),
    ],
)
def test_signatures_that_fit(want: Wanted, parameters: str | None, fitting: bool) -> None:
    assert fits(want, parameters) is fitting
