"""What a history counts, since the start. Metrics read it; nothing here knows how it is shown."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from histospec.server.errors import StoreError

LOOKUPS = ("hit", "miss", "failed", "skipped")


@dataclass
class Counts:
    """Each number is written by one thread."""

    stored_responses: int = 0
    """Ingested or committed."""
    stored_tokens: int = 0
    loaded_responses: int = 0
    """Indexed from the store since the start."""
    loading: bool = False
    """Whether the store is being loaded in the background."""
    store_errors: int = 0
    """Requests that the store could not do."""
    lookups: Counter[str] = field(default_factory=Counter)
    """Problems that the index did not hold, by what asking the store gave: one of LOOKUPS."""

    @contextmanager
    def store_request(self) -> Iterator[None]:
        """Counts a StoreError that the block raises, and passes it on."""
        try:
            yield
        except StoreError:
            self.store_errors += 1
            raise
