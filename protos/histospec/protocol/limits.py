"""What no server takes, whatever its settings, and no client should send."""

MAX_TOKEN = (1 << 31) - 1
MAX_NAMESPACE = 128
"""Characters of a namespace."""
MAX_PROBLEM = 1024
"""Characters of a problem id."""
MAX_EPOCH = 1 << 52
"""The largest epoch that a caller may name. As many again are left to be counted exactly, in the floating-point scores
of Redis, too."""
MAX_DRAFT = 1024
"""Tokens of a draft: the engine's own limit, `kMaxDraft`."""
DEFAULT_MAX_DRAFT = 256
"""The same, of a server that was not told otherwise, and of every client."""
MAX_QUANTILES = 64
"""Of one PredictLength."""
