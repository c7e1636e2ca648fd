"""The counters of a history since the start. Metrics read them."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from histospec.server.errors import StoreError

LOOKUPS = ("hit", "miss", "failed", "skipped")


@dataclass
class Counts:
    """Only one thread writes each number."""

    stored_responses: int = 0
    """Responses ingested or committed."""
    stored_tokens: int = 0
    loaded_responses: int = 0
    """Responses indexed from the store since the start."""
    loading: bool = False
    """Whether the store is being loaded in the background."""
    store_errors: int = 0
    """Requests that failed in the store."""
    lookups: Counter[str] = field(default_factory=Counter)
    """Look-ups in the store for problems missing in the index, by result: one of LOOKUPS."""

    @contextmanager
    def store_request(self) -> Iterator[None]:
        """Counts a StoreError that the block raises, and lets it pass."""
        try:
            yield
        except StoreError:
            self.store_errors += 1
            raise
