"""Names that both sides know, and what a name must not be."""

DRAFT_SERVICE = "histospec.v1.DraftService"

LIMITS = {
    "batch": "histospec-max-batch",
    "message": "histospec-max-message",
    "draft": "histospec-max-draft-tokens",
    "sessions": "histospec-max-sessions-per-stream",
}
"""What a server takes, in the trailing metadata of Topology: sessions of a message, its bytes, tokens of a draft, open
sessions of a stream."""


def white_space(name: str) -> str:
    """What is wrong with a name that begins or ends with white space, which a reader does not see; or nothing."""
    bare = name.strip()
    if bare == name:
        return ""
    return f"{name!r} begins or ends with white space; give {bare!r}" if bare else f"{name!r} is white space alone"
