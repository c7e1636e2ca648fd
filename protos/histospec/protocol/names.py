"""Names that both sides know."""

DRAFT_SERVICE = "histospec.v1.DraftService"

LIMITS = {
    "batch": "histospec-max-batch",
    "message": "histospec-max-message",
    "draft": "histospec-max-draft-tokens",
    "sessions": "histospec-max-sessions-per-stream",
}
"""What a server takes, in the trailing metadata of Topology: sessions of a message, its bytes, tokens of a draft, open
sessions of a stream."""
