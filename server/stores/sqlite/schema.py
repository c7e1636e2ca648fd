"""The schema of the SQLite store by version, and which servers can use a file of each version.

A server uses a file of its own version and migrates an older one. It uses a newer one if the file allows it:
`compatibility.readable_from` is the oldest version whose servers can read and write the file. So a server of the
previous version can take over (`helm rollback`). To add a version, decide which kind it is:

- additive: new tables, indexes and columns that older servers need not know. Each row that an older server writes is
  correct without them: a new column has a default, and NULL means unknown. `readable_from` stays.
- not additive: older servers would misread something, or omit rows on which newer ones rely. `readable_from` is the new
  version, and the server copies a file of an older version first.
"""

from typing import NamedTuple

APPLICATION_ID = 0x48495354  # "HIST"


class Filling(NamedTuple):
    """Rows derived from those of all prompts: made in slices, while the file still has the previous version.

    If this server is killed, a server of that version may write in between. Prompts that it adds are filled later. The
    script of the version must handle the rest: removed prompts, and new responses of prompts that were already filled.
    Those have ids above `filling.response`, the newest id when the filling began.
    """

    tables: str
    """Created if they do not exist."""
    steps: tuple[str, ...]
    """Statements that fill the prompts with ids above {above} and up to {upto}."""


class Version(NamedTuple):
    """The changes of a version."""

    script: str
    """Runs in one transaction."""
    readable_from: int
    """The oldest version whose servers can use a file of this one; at least 5, the first that checks this."""
    filling: Filling | None = None


# A new file takes all versions, an older one those that it lacks.
VERSIONS = (
    Version(
        """
CREATE TABLE prompts (
    id INTEGER PRIMARY KEY,
    namespace TEXT NOT NULL,
    problem TEXT NOT NULL,  -- the explicit name, or '' where the tokens name the problem
    digest BLOB NOT NULL,   -- narrows the search; the tokens decide
    tokens BLOB NOT NULL
);
CREATE INDEX prompts_by_digest ON prompts (namespace, problem, digest);
CREATE TABLE responses (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- ids are never used twice, so they order responses by arrival
    prompt INTEGER NOT NULL REFERENCES prompts (id),
    epoch INTEGER NOT NULL,
    reward REAL,
    tokens BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    generated BLOB NOT NULL
);
CREATE INDEX responses_by_prompt ON responses (prompt, epoch);
""",
        readable_from=1,
    ),
    Version(
        """
CREATE TABLE estimators (
    namespace TEXT PRIMARY KEY,
    state BLOB NOT NULL
);
""",
        readable_from=1,
    ),
    Version(  # not additive: retention and epochs rely on rows that older servers do not write
        """
INSERT INTO namespaces
    SELECT namespace, max(epoch) FROM responses JOIN prompts ON prompts.id = prompt
    WHERE responses.id > (SELECT response FROM filling) GROUP BY namespace
    ON CONFLICT (namespace) DO UPDATE SET newest_epoch = max(newest_epoch, excluded.newest_epoch);
INSERT OR IGNORE INTO namespaces SELECT namespace, 0 FROM estimators;
DELETE FROM writes WHERE prompt NOT IN (SELECT id FROM prompts);
CREATE TRIGGER prompts_leave AFTER DELETE ON prompts BEGIN
    DELETE FROM responses WHERE prompt = old.id;
    DELETE FROM writes WHERE prompt = old.id;
END;
""",
        readable_from=3,
        filling=Filling(
            tables="""
CREATE TABLE IF NOT EXISTS namespaces (
    namespace TEXT PRIMARY KEY,
    newest_epoch INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS writes (  -- beside the prompts, whose rows are long
    prompt INTEGER PRIMARY KEY REFERENCES prompts (id),
    latest REAL NOT NULL  -- seconds since 1970
);
""",
            steps=(
                """
INSERT INTO namespaces
    SELECT namespace, max(epoch) FROM prompts JOIN responses ON prompt = prompts.id
    WHERE prompts.id > {above} AND prompts.id <= {upto} GROUP BY namespace
    ON CONFLICT (namespace) DO UPDATE SET newest_epoch = max(newest_epoch, excluded.newest_epoch);
""",
                """
INSERT OR REPLACE INTO writes
    SELECT id, strftime('%s', 'now') FROM prompts WHERE id > {above} AND id <= {upto};
""",
            ),
        ),
    ),
    Version(  # additive
        """
ALTER TABLE responses ADD COLUMN seed INTEGER;  -- NULL if unknown
""",
        readable_from=3,
    ),
    Version(  # not additive: older servers would bring back what is leaving
        """
ALTER TABLE responses ADD COLUMN checksum INTEGER;  -- NULL where it was stored before there were checksums
CREATE TABLE leaving (  -- responses that a drop or a rewind takes out, a few at a time
    id INTEGER PRIMARY KEY,
    namespace TEXT NOT NULL,
    epoch INTEGER NOT NULL,    -- those of newer epochs leave ...
    response INTEGER NOT NULL  -- ... whose id is not above this one
);
CREATE TABLE clock (  -- one row: how far the times in `writes` can be trusted
    one INTEGER PRIMARY KEY CHECK (one = 1),
    seen REAL NOT NULL,       -- the latest time of day that a server with a retention has seen
    since REAL NOT NULL,      -- from when to `seen` the time of day went on evenly
    forgotten REAL NOT NULL,  -- problems that retention forgot in the hour before `seen`
    paused TEXT NOT NULL      -- why retention waits for a person, or ''
);
""",
        readable_from=5,
    ),
    Version(  # additive; `checksum` leaves the new column out, which has a checksum of its own
        """
ALTER TABLE responses ADD COLUMN alternatives BLOB;  -- NULL if there are none
""",
        readable_from=5,
    ),
)
SCHEMA_VERSION = len(VERSIONS)

COMPATIBILITY = """
CREATE TABLE IF NOT EXISTS compatibility (  -- one row; absent in files that servers before it wrote
    version INTEGER PRIMARY KEY,    -- of the schema: the row says nothing about another one
    readable_from INTEGER NOT NULL  -- servers of this version and newer can use the file
);
"""
FILLING = """
CREATE TABLE IF NOT EXISTS filling (  -- one row, while rows of a new version are being derived
    one INTEGER PRIMARY KEY CHECK (one = 1),
    prompt INTEGER NOT NULL,   -- prompts up to this one have theirs ...
    response INTEGER NOT NULL  -- ... from the responses up to this one
);
"""
