"""Where snapshots are: files in a folder, or objects in S3, Google Cloud Storage or Azure through `obstore`.

Credentials, region and endpoint of an object store come from the variables of each provider's own tools, such as
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL.
"""

import io
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from histospec.protocol.redaction import redacted
from histospec.replay.recordings import RecordingError, opened
from histospec.server.errors import ConfigError, reason
from histospec.server.output_file import OutputError, written

DATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ\.jsonl\.gz")
PARTIAL = ".partial"
FILES = (".jsonl", ".jsonl.gz")
SCHEMES = ("s3", "gs", "az")
PART = 16 << 20  # bytes of a part of an upload; S3 takes 10,000 of them
PARTS = 2  # parts uploaded at a time
READ = 1 << 20
LONGEST = 300  # characters of an error: object stores answer with long XML documents
# A part may take minutes on a slow network. Plain HTTP is allowed, because the user names the endpoint.
CLIENT = {"timeout": "600s", "connect_timeout": "10s", "allow_http": True}
RETRY = {"max_retries": 5}

T = TypeVar("T")


def snapshot_target(text: str, force: bool = False) -> "SnapshotTarget":
    """Returns the target that a user names. Raises ConfigError.

    An existing folder, or a name that ends with a slash, holds dated snapshots. So does a URL, unless it ends like a
    snapshot file. Anything else is one file. `force`: see `written`.
    """
    scheme, slashes, rest = text.partition("://")
    if slashes:
        head, _, last = rest.rpartition("/")
        return Bucket(f"{scheme}://{head}", last) if head and last.endswith(FILES) else Bucket(text)
    if text.endswith("/") or os.path.isdir(text):
        return Folder(text)
    return Folder("", text, force)


def dated_name() -> str:
    """Returns the name of a snapshot that starts now."""
    return time.strftime("%Y-%m-%dT%H-%M-%SZ.jsonl.gz", time.gmtime())


class SnapshotTarget(ABC):
    """One named snapshot, or all dated snapshots in one place. Methods raise ConfigError.

    Args:
        where: a folder or a URL; "" for a file that `name` names alone.
        name: of the one snapshot; "" for dated snapshots, each named by its start time.

    """

    def __init__(self, where: str, name: str = "") -> None:
        self.where = where
        self.name = name

    @abstractmethod
    def names(self) -> list[str]:
        """Returns the names of the dated snapshots, oldest first."""

    @abstractmethod
    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        """Writes a whole snapshot, or nothing if `pieces` raises. Replaces a snapshot with this name.

        Raises OutputError if writing fails halfway.
        """

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Removes these snapshots, and the leftovers of older unfinished ones."""

    @abstractmethod
    def opened(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Opens a snapshot for reading. `seek(0)` starts again, if the file is `seekable()`."""

    def path(self, name: str) -> str:
        """Returns the full name of a snapshot."""
        return f"{self.where.rstrip('/')}/{name}" if self.where else name

    def newest(self) -> str:
        """Returns the name of the newest snapshot. Raises ConfigError if there is none, or if a name is `ahead`."""
        names = self.names()
        if not names:
            raise ConfigError(f"{self.where}: has no snapshot such as 2026-11-23T02-00-00Z.jsonl.gz; give another")
        if ahead(names):
            raise ConfigError(
                f"{self.path(names[-1])}: its time is in the future, so it may not be the newest; give the full name "
                "of a snapshot"
            )
        return names[-1]

    def surplus(self, number: int, written: str) -> list[str]:
        """Returns the names of all but the newest `number` snapshots and `written`, a full name."""
        return [name for name in self.names()[:-number] if self.path(name) != written]


def ahead(names: Iterable[str]) -> list[str]:
    """Returns the names in the future: a clock was wrong, so they do not tell which snapshot is the newest."""
    now = dated_name()
    return [name for name in names if name > now]


class Folder(SnapshotTarget):
    """The snapshots in a folder, or one file, pipe or standard stream."""

    def __init__(self, where: str, name: str = "", force: bool = False) -> None:
        super().__init__(where, name)
        self._force = force

    def names(self) -> list[str]:
        """See SnapshotTarget."""
        try:
            return sorted(name for name in os.listdir(self.where) if DATED.fullmatch(name))
        except OSError as error:
            raise ConfigError(f"{self.where}: {reason(error)}; give a folder that can be read") from None

    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        """See SnapshotTarget."""
        with written(self.path(name), force=self._force, private=True) as file:
            file.writelines(pieces)

    def remove(self, names: Sequence[str]) -> None:
        """See SnapshotTarget."""
        newest = self.names()[-1:]
        for path in Path(self.where).iterdir():
            stale = path.name.endswith(PARTIAL) and DATED.match(path.name) and [path.name] < newest
            if stale or path.name in names:
                with suppress(FileNotFoundError):
                    path.unlink()

    def opened(self, name: str) -> AbstractContextManager[BinaryIO]:
        """See SnapshotTarget."""
        return opened(self.path(name))


class Bucket(SnapshotTarget):
    """The objects under a URL, `s3://BUCKET/PREFIX`. Raises ConfigError if the URL is wrong or obstore is missing."""

    def __init__(self, where: str, name: str = "") -> None:
        super().__init__(where, name)
        if "@" in where.partition("://")[2].partition("/")[0]:
            raise ConfigError(f"{redacted(where)}: must not hold a user or password; set the variables of the provider")
        scheme = where.partition("://")[0]
        if scheme not in SCHEMES:
            known = ", ".join(f"{known}://" for known in SCHEMES)
            raise ConfigError(f"{where}: unknown scheme {scheme}://; use {known} or a file")
        try:
            self._obstore: Any = import_module("obstore")
            store: Any = import_module("obstore.store")
        except ImportError as error:
            raise ConfigError(f"{where}: needs obstore ({error}): pip install 'histospec[backup]'") from None
        self._failures = (self._obstore.exceptions.BaseError, OSError, ValueError)
        self._store = self._asked(lambda: store.from_url(where, client_options=CLIENT, retry_config=RETRY))

    def names(self) -> list[str]:
        """See SnapshotTarget."""
        found = self._asked(lambda: self._obstore.list_with_delimiter(self._store))
        return sorted(one["path"] for one in found["objects"] if DATED.fullmatch(one["path"]))

    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        """See SnapshotTarget. An unfinished upload leaves no object."""
        try:
            self._obstore.put(self._store, name, pieces, use_multipart=True, chunk_size=PART, max_concurrency=PARTS)
        except (self._obstore.exceptions.BaseError, OSError) as error:
            raise OutputError(f"{self.path(name)}: {_words(error)}; nothing was written") from None

    def remove(self, names: Sequence[str]) -> None:
        """See SnapshotTarget. The bucket's lifecycle rules remove unfinished uploads."""
        if names:
            self._asked(lambda: self._obstore.delete(self._store, list(names)))

    @contextmanager
    def opened(self, name: str) -> Iterator[BinaryIO]:
        """See SnapshotTarget."""

        def get() -> Iterator[bytes]:
            answer = self._asked(lambda: self._obstore.get(self._store, name), name)
            return iter(answer.stream(min_chunk_size=READ))

        try:
            with io.BufferedReader(_Object(get), READ) as file:
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


class _Object(io.RawIOBase):
    """A file that reads an object as it arrives; `seek` to the beginning requests it again."""

    def __init__(self, get: Callable[[], Iterator[bytes]]) -> None:
        self._get = get
        self._pieces = get()
        self._rest = memoryview(b"")
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if (offset, whence) != (0, io.SEEK_SET):
            raise io.UnsupportedOperation("seek")
        self._pieces, self._rest, self._position = self._get(), memoryview(b""), 0
        return 0

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        self._position += size
        return size


def _words(error: BaseException) -> str:
    """Returns one line of limited length: the store's answer, or else the library's message."""
    text = " ".join(str(error).partition("Debug source:")[0].split())
    if answer := re.search("<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", text):
        text = f"{answer[1]}: {answer[2].rstrip('.')}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
