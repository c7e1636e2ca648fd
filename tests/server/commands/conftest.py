"""A store with a little of every kind of data, and commands on it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from histospec.server import cli
from tests.support.contents import fill, on_disk

Run = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STORE", "DATA_DIR", "HISTORY_EPOCHS", "CONFIG"):
        monkeypatch.delenv(f"HISTOSPEC_{name}", raising=False)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """run(word, ...) returns the exit status and the output."""

    def run(*words: object) -> tuple[int, str]:
        capsys.readouterr()
        code = cli.main([str(word) for word in words])
        out, err = capsys.readouterr()
        return code, out + err

    return run


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Returns the directory of a store with a little of every kind of data."""
    store = on_disk(tmp_path)
    fill(store)
    store.close()
    return tmp_path / "data"
