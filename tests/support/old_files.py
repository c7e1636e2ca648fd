"""SQLite files of an older schema, without namespaces and times of writes, and their contents after an update."""

import sqlite3
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import numpy as np

from histospec.server.stores.interface import Problem
from histospec.server.stores.sqlite.reader import digest_of
from histospec.server.stores.sqlite.schema import APPLICATION_ID, VERSIONS

OLD = 2
NAMESPACES = ("a", "b", "c")


class OldFile:
    """A file of schema 2, written as a server of that version writes it."""

    def __init__(self, path: Path, seed: int = 0) -> None:
        self.path = path
        self._random = np.random.default_rng(seed)
        scripts = "".join(version.script for version in VERSIONS[:OLD])
        with closing(sqlite3.connect(path)) as connection:
            connection.executescript(
                f"PRAGMA journal_mode = WAL; PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {OLD};"
                f"{scripts} INSERT INTO estimators VALUES ('learned', X'01');"
            )

    def add(self, problems: int, epochs: int = 4) -> None:
        """Adds problems with up to two responses of each epoch."""
        with closing(sqlite3.connect(self.path)) as connection, connection:
            for _ in range(problems):
                tokens = self._random.integers(0, 1000, 5).astype("<i4").tobytes()
                row = (str(self._random.choice(NAMESPACES)), "", digest_of(tokens), tokens)
                insert = "INSERT INTO prompts (namespace, problem, digest, tokens) VALUES (?, ?, ?, ?)"
                prompt = connection.execute(insert, row).lastrowid
                assert prompt is not None
                self._respond(connection, prompt, range(epochs))

    def change(self) -> None:
        """What a server of that version may do beside adding: newer epochs of old problems, and drops."""
        with closing(sqlite3.connect(self.path)) as connection, connection:
            prompts = [prompt for (prompt,) in connection.execute("SELECT id FROM prompts ORDER BY id")]
            ((newest,),) = connection.execute("SELECT max(epoch) FROM responses").fetchall()
            for prompt in prompts[:10]:
                self._respond(connection, prompt, range(newest + 1, newest + 9))
            for prompt in [prompts[10], prompts[len(prompts) // 2], prompts[-1]]:
                connection.execute("DELETE FROM responses WHERE prompt = ?", (prompt,))
                connection.execute("DELETE FROM prompts WHERE id = ?", (prompt,))

    def _respond(self, connection: sqlite3.Connection, prompt: int, epochs: range) -> None:
        for epoch in epochs:
            for _ in range(int(self._random.integers(0, 3))):
                tokens = self._random.integers(0, 1000, 8).astype("<i4").tobytes()
                insert = "INSERT INTO responses (prompt, epoch, tokens, logprobs, generated) VALUES (?, ?, ?, X'', X'')"
                connection.execute(insert, (prompt, epoch, tokens))

    def version(self) -> int:
        """Of the schema that the file says it has."""
        with closing(sqlite3.connect(self.path)) as connection:
            return int(connection.execute("PRAGMA user_version").fetchone()[0])

    def expected(self) -> tuple[dict[str, int], dict[Problem, list[tuple[int, bytes]]], set[int]]:
        """Newest epochs, responses by problem, prompts whose writing has a time: looked up row by row."""
        newest, responses, written = {"learned": 0}, defaultdict(list), set()
        with closing(sqlite3.connect(self.path)) as connection:
            for prompt, namespace, tokens in connection.execute("SELECT id, namespace, tokens FROM prompts").fetchall():
                written.add(prompt)
                mine = "SELECT epoch, tokens FROM responses WHERE prompt = ? ORDER BY epoch, id"
                for epoch, text in connection.execute(mine, (prompt,)):
                    newest[namespace] = max(newest.get(namespace, 0), epoch)
                    responses[Problem(namespace, tokens)].append((epoch, text))
        return newest, dict(responses), written
