"""Batches to store, with defaults for what a test does not care about."""

from typing import Any

from histospec.server.stores.interface import Problem, Record, ResponseBatch, Store


def batch(
    tokens: bytes, epoch: int = 0, prompt: bytes = b"prompt..", namespace: str = "run", name: str = ""
) -> ResponseBatch:
    """One response of one problem."""
    return ResponseBatch(Problem(namespace, prompt, name), [Record(tokens, epoch)])


def put(store: Store, *args: Any, **fields: Any) -> None:
    """Stores a `batch`; returns when that is done."""
    store.append(batch(*args, **fields)).result()
