"""The schema of the SQLite store, version by version."""

APPLICATION_ID = 0x48495354  # "HIST"

# One script a version: a new file takes them all, an older one those that it has not seen.
SCHEMA = (
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
    """
CREATE TABLE estimators (
    namespace TEXT PRIMARY KEY,
    state BLOB NOT NULL
);
""",
    """
CREATE TABLE namespaces (
    namespace TEXT PRIMARY KEY,
    newest_epoch INTEGER NOT NULL
);
INSERT INTO namespaces
    SELECT namespace, max(epoch) FROM responses JOIN prompts ON prompts.id = prompt GROUP BY namespace;
INSERT OR IGNORE INTO namespaces SELECT namespace, 0 FROM estimators;
CREATE TABLE writes (  -- beside the prompts, whose rows are long
    prompt INTEGER PRIMARY KEY REFERENCES prompts (id),
    latest REAL NOT NULL  -- seconds since 1970
);
INSERT INTO writes SELECT id, strftime('%s', 'now') FROM prompts;
CREATE TRIGGER prompts_leave AFTER DELETE ON prompts BEGIN
    DELETE FROM responses WHERE prompt = old.id;
    DELETE FROM writes WHERE prompt = old.id;
END;
""",
    """
ALTER TABLE responses ADD COLUMN seed INTEGER;  -- NULL where nobody knows it
""",
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
)
SCHEMA_VERSION = len(SCHEMA)
