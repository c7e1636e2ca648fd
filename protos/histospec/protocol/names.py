"""Names that both sides know, and a check of names."""

DRAFT_SERVICE = "histospec.v1.DraftService"

LIMITS = {
    "batch": "histospec-max-batch",
    "message": "histospec-max-message",
    "draft": "histospec-max-draft-tokens",
    "sessions": "histospec-max-sessions-per-stream",
}
"""The server's limits in the trailing metadata of Topology: sessions of a message, its bytes, tokens of a draft, open
sessions of a stream."""


def white_space(name: str) -> str:
    """Returns what is wrong with a name that begins or ends with white space; empty if it does not."""
    bare = name.strip()
    if bare == name:
        return ""
    return f"{name!r} begins or ends with white space; give {bare!r}" if bare else f"{name!r} is white space alone"
