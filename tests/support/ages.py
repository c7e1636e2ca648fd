"""Changes the times of writes in a SQLite store."""

import time

from histospec.server.stores.sqlite.retention import Trust, note_down
from histospec.server.stores.sqlite.store import SQLiteStore
from tests.support.waiting import eventually


def vouch(store: SQLiteStore) -> None:
    """As if the clock had gone on evenly since 1970."""
    store.submit(lambda connection: note_down(Trust(time.time(), 0.0), "", connection)).result()


def age(store: SQLiteStore, condition: str, seconds: float) -> None:
    """As if what meets the condition had been written so long ago."""
    text = f"UPDATE writes SET latest = latest - ? WHERE prompt IN (SELECT id FROM prompts WHERE {condition})"
    store.submit(lambda connection: connection.execute(text, (seconds,))).result()


def forgotten_down_to(store: SQLiteStore, responses: int) -> bool:
    """Whether retention leaves so many."""
    eventually(lambda: store.count() == responses, "retention forgets something else")
    return not store.retention_paused
