"""What the SQLite store holds."""

import hashlib
import sqlite3
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from histospec.server.errors import Damaged, StoreError
from histospec.server.stores.damage import Damage
from histospec.server.stores.interface import Problem, Reader, Record, ResponseBatch, within
from histospec.server.stores.records import checksum, sound
from histospec.server.stores.sqlite.file import is_damage

PAGE = 500  # prompts listed at a time

COLUMNS = "id, prompt, checksum, tokens, epoch, reward, logprobs, generated, seed"
# What a drop or a rewind has yet to take out is gone already for everybody who reads; the parameter is the namespace.
STAYS = (
    "NOT EXISTS (SELECT 1 FROM leaving WHERE leaving.namespace = ? "
    "AND responses.epoch > leaving.epoch AND responses.id <= leaving.response)"
)


class SQLiteReader(Reader):
    """Reads through one connection; of each problem the newest `history_responses`, all where that is 0."""

    def __init__(self, connection: sqlite3.Connection, path: Path, history_responses: int = 0) -> None:
        self._reader = connection
        self._path = path
        self._most = history_responses
        self._reading = threading.Lock()
        self._damage = Damage()

    def newest_epochs(self) -> dict[str, int]:
        """See Reader."""
        rows = self._read("SELECT CAST(namespace AS TEXT), CAST(newest_epoch AS INTEGER) FROM namespaces")
        return {namespace: max(0, newest) for namespace, newest in rows}

    def problems(self, namespace: str) -> Iterator[tuple[Problem, list[Record]]]:
        """See Reader."""
        last: tuple[str, bytes, int] = ("", b"", 0)
        done = ""  # the last name that was met: a named problem may have several prompts
        while page := self._read(
            "SELECT problem, digest, id FROM prompts WHERE namespace = ? AND (problem, digest, id) > (?, ?, ?) "
            "ORDER BY problem, digest, id LIMIT ?",
            (namespace, *last, PAGE),
        ):
            for name, digest, prompt in page:
                if name and name == done:
                    continue
                tokens = self._prompt(prompt, digest)
                if tokens is None:
                    continue
                done = name
                problem = Problem(namespace, tokens, name)
                if records := self.history(problem):
                    yield problem, records
            last = page[-1]

    def _prompt(self, prompt: int, digest: object) -> bytes | None:
        """Its tokens; None where it left meanwhile, or is damaged, which makes its responses useless."""
        for (tokens,) in self._read("SELECT tokens FROM prompts WHERE id = ?", (prompt,)):
            if isinstance(tokens, bytes) and digest_of(tokens) == digest:
                return tokens
            self._useless(prompt)
        return None

    def _useless(self, prompt: int) -> None:
        """Counts the responses of a prompt that is not known."""
        for (response,) in self._read("SELECT id FROM responses WHERE prompt = ?", (prompt,)):
            self._damage.found(response, "store: the prompt of a response is not what was written")

    def history(self, problem: Problem, limit: int = 0, room: int | None = None) -> list[Record]:
        """See Reader."""
        among, key = prompts_of(problem)
        newest = min(limit or self._most, self._most or limit) or -1
        query = f"FROM responses WHERE prompt IN ({among}) AND {STAYS} ORDER BY epoch DESC, id DESC LIMIT ?"
        parameters = (*key, problem.namespace, newest)
        if room is not None:
            sizes = f"SELECT length(tokens) + length(logprobs) + length(generated) AS size {query}"
            (held,) = self._read(f"SELECT total(size) FROM ({sizes})", parameters)[0]
            within(room, int(held))
        return self._records(self._read(f"SELECT {COLUMNS} {query}", parameters))[::-1]

    def _records(self, rows: Sequence[Any]) -> list[Record]:
        """The responses in these rows, without those that are damaged."""
        records = (self._intact(row) for row in rows)
        return [record for record in records if record is not None]

    def _intact(self, row: Sequence[Any]) -> Record | None:
        try:
            return record_of(row)
        except Damaged as error:
            self._damage.found(row[0], str(error))
            return None

    def estimator(self, namespace: str) -> bytes | None:
        """See Reader."""
        rows = self._read("SELECT CAST(state AS BLOB) FROM estimators WHERE namespace = ?", (namespace,))
        return bytes(rows[0][0]) if rows else None

    def count(self) -> int:
        """See Reader."""
        return int(self._read("SELECT count(*) FROM responses")[0][0])

    def load(self) -> Iterator[ResponseBatch]:
        """Every response stored before this call, oldest epoch first, one problem and epoch at a time."""
        newest = self._read("SELECT max(id) FROM responses")[0][0] or 0
        groups = self._read(
            "SELECT DISTINCT epoch, prompt FROM responses WHERE id <= ? ORDER BY epoch, prompt", (newest,)
        )
        oldest = self._oldest_loaded()
        for epoch, prompt in groups:
            owner = self._read("SELECT namespace, problem, digest FROM prompts WHERE id = ?", (prompt,))
            if not owner:  # it left meanwhile, and its responses with it
                self._useless(prompt)
            tokens = self._prompt(prompt, owner[0][2]) if owner else None
            if tokens is None:
                continue
            problem = Problem(owner[0][0], tokens, owner[0][1])
            rows = self._read(
                f"SELECT {COLUMNS} FROM responses WHERE prompt = ? AND epoch = ? AND id <= ? AND (epoch, id) >= (?, ?) "
                f"AND {STAYS} ORDER BY id",
                (prompt, epoch, newest, *oldest.get(prompt, (-1, 0)), problem.namespace),
            )
            if records := self._records(rows):  # else they left the window meanwhile
                yield ResponseBatch(problem, records)

    def _oldest_loaded(self) -> dict[int, tuple[int, int]]:
        """Of each prompt with more responses than are kept: epoch and id of the oldest that counts."""
        if not self._most:
            return {}
        many = self._read("SELECT prompt FROM responses GROUP BY prompt HAVING count(*) > ?", (self._most,))
        oldest = "SELECT epoch, id FROM responses WHERE prompt = ? ORDER BY epoch DESC, id DESC LIMIT 1 OFFSET ?"
        return {prompt: self._read(oldest, (prompt, self._most - 1))[0] for (prompt,) in many}

    def _read(self, query: str, parameters: Sequence[object] = ()) -> list[Any]:
        for repaired in (False, True):
            failure: Exception
            with self._reading:
                used = self._reader
                try:
                    return used.execute(query, parameters).fetchall()
                except (sqlite3.Error, UnicodeDecodeError) as error:
                    failure = error
            if repaired or not is_damage(failure) or not self._repair(used, failure):
                break
        raise StoreError(f"store: {self._path} cannot be read: {failure}") from failure

    def _repair(self, used: sqlite3.Connection, error: Exception) -> bool:
        """Whether there is now another file to read than the damaged one that `used` reads."""
        return False

    @property
    def damaged_responses(self) -> int:
        """See Reader."""
        return self._damage.responses

    def close(self) -> None:
        """See Reader."""
        self._reader.close()


def record_of(row: Sequence[Any]) -> Record:
    """The response in a row of COLUMNS. Raises Damaged."""
    _, prompt, stored, *columns = row
    record = Record(*columns)
    if stored is None:
        return sound(record)
    try:
        intact = checksum(record, prompt) == stored
    except (TypeError, struct.error):  # damage may change the type of a value, too
        intact = False
    if not intact:
        raise Damaged("store: a response does not have the checksum that it was stored with")
    return record


def digest_of(tokens: bytes) -> bytes:
    """8 bytes that narrow the search for a prompt."""
    return hashlib.blake2b(tokens, digest_size=8).digest()


def prompts_of(problem: Problem) -> tuple[str, tuple[str | bytes, ...]]:
    """A query for the prompts of a problem, and its parameters: a named problem may have several prompts."""
    if problem.name:
        return "SELECT id FROM prompts WHERE namespace = ? AND problem = ?", (problem.namespace, problem.name)
    return (
        "SELECT id FROM prompts WHERE namespace = ? AND problem = '' AND digest = ? AND tokens = ?",
        (problem.namespace, digest_of(problem.prompt), problem.prompt),
    )
