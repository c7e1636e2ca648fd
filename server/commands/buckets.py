"""Snapshots in an object store: S3 and compatible ones, Google Cloud Storage or Azure, through `obstore`.

Credentials, region and endpoint come from the variables of each provider's own tools, such as AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL.
"""

import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, BinaryIO, TypeVar

from histospec.replay.recordings import RecordingError
from histospec.server.commands.place import DATED, Place
from histospec.server.errors import ConfigError
from histospec.server.output_file import OutputError

SCHEMES = ("s3", "gs", "az")
PART = 16 << 20  # bytes of a part of an upload; S3 takes 10,000 of them
PARTS = 2  # parts uploaded at a time
READ = 1 << 20
LONGEST = 300  # characters of an error: object stores answer with long XML documents
# A part may take minutes on a slow network. Plain HTTP is allowed, because the user names the endpoint.
CLIENT = {"timeout": "600s", "connect_timeout": "10s", "allow_http": True}
RETRY = {"max_retries": 5}

T = TypeVar("T")


class Bucket(Place):
    """The objects under a URL, `s3://BUCKET/PREFIX`. Raises ConfigError if the URL is wrong or obstore is missing."""

    def __init__(self, url: str) -> None:
        self.where = url
        scheme = url.partition("://")[0]
        if scheme not in SCHEMES:
            known = ", ".join(f"{known}://" for known in SCHEMES)
            raise ConfigError(f"{url}: unknown scheme {scheme}://; use {known} or a file")
        try:
            self._obstore: Any = import_module("obstore")
            store: Any = import_module("obstore.store")
        except ImportError as error:
            raise ConfigError(f"{url}: needs obstore ({error}): pip install 'histospec[backup]'") from None
        self._failures = (self._obstore.exceptions.BaseError, OSError, ValueError)
        self._store = self._asked(lambda: store.from_url(url, client_options=CLIENT, retry_config=RETRY))

    def names(self) -> list[str]:
        """See Place."""
        found = self._asked(lambda: self._obstore.list_with_delimiter(self._store))
        return sorted(one["path"] for one in found["objects"] if DATED.fullmatch(one["path"]))

    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        """See Place. An unfinished upload leaves no object."""
        try:
            self._obstore.put(self._store, name, pieces, use_multipart=True, chunk_size=PART, max_concurrency=PARTS)
        except (self._obstore.exceptions.BaseError, OSError) as error:
            raise OutputError(f"{self.path(name)}: {_words(error)}; nothing was written") from None

    def remove(self, names: Sequence[str]) -> None:
        """See Place. The bucket's lifecycle rules remove unfinished uploads."""
        if names:
            self._asked(lambda: self._obstore.delete(self._store, list(names)))

    @contextmanager
    def opened(self, name: str) -> Iterator[BinaryIO]:
        """See Place."""
        answer = self._asked(lambda: self._obstore.get(self._store, name), name)
        try:
            with io.BufferedReader(_Stream(answer.stream(min_chunk_size=READ)), READ) as file:
                yield file
        except RecordingError as error:
            raise ConfigError(f"{self.path(name)}: {error}") from None
        except self._obstore.exceptions.BaseError as error:
            raise ConfigError(f"{self.path(name)}: cannot be read ({_words(error)}); try again") from None

    def _asked(self, ask: Callable[[], T], name: str = "") -> T:
        try:
            return ask()
        except self._failures as error:
            what = self.path(name) if name else self.where
            advice = "a snapshot" if isinstance(error, FileNotFoundError) else "the URL and the credentials of a bucket"
            raise ConfigError(f"{what}: {_words(error)}; give {advice}") from None


class _Stream(io.RawIOBase):
    """A file that reads from an iterable of bytes."""

    def __init__(self, pieces: Iterable[Any]) -> None:
        self._pieces = iter(pieces)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def _words(error: BaseException) -> str:
    """Returns one line of limited length: the store's answer, or else the library's message."""
    text = " ".join(str(error).partition("Debug source:")[0].split())
    if answer := re.search("<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", text):
        text = f"{answer[1]}: {answer[2].rstrip('.')}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
