"""A SQLite store of a directory, opened as often as a test wants."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from histospec.server.stores.sqlite.store import SQLiteStore


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[..., SQLiteStore]]:
    stores = []

    def open_(history_epochs: int = 8, **options: Any) -> SQLiteStore:
        stores.append(SQLiteStore(tmp_path, history_epochs, **options))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()
