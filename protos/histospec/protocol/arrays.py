"""The types of arrays in messages: flat and little-endian on every machine."""

import numpy as np

INT32 = np.dtype("<i4")
"""Tokens, positions and lengths."""
INT64 = np.dtype("<i8")
"""Offsets into flat arrays."""
UINT64 = np.dtype("<u8")
"""Sessions."""
FLOAT32 = np.dtype("<f4")
"""Probabilities and logprobs."""
