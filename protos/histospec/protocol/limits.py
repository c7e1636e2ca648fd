"""Limits of every server, whatever its settings; clients must not exceed them."""

MAX_TOKEN = (1 << 31) - 1
MAX_NAMESPACE = 128
"""Characters of a namespace."""
MAX_PROBLEM = 1024
"""Characters of a problem id."""
MAX_EPOCH = 1 << 52
"""The largest epoch that a caller may name. Weight changes can raise it by as much again, and it remains exact even in
the floating-point scores of Redis."""
MAX_DRAFT = 1024
"""Tokens of a draft: the engine's own limit, `kMaxDraft`."""
DEFAULT_MAX_DRAFT = 256
"""The default of a server's limit, and the limit of every client."""
MAX_QUANTILES = 64
"""Quantiles of one PredictLength."""
