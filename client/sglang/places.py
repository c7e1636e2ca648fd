"""Puts drafts into the places that SGLang verifies: a fixed number per request, the first of them its last token.

SGLang takes a batch's places as two flat arrays: the tokens, and a mask that says for each place which others it
follows. A chain's mask is a lower triangle. Places behind a short draft repeat its last token: SGLang verifies them in
any case. They continue the chain, so a wrong one is rejected like any token, and the output stays exact.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def put(tokens: NDArray[np.int64], mask: NDArray[np.integer], rows: Sequence[Sequence[int]], places: int) -> None:
    """Replaces SGLang's own drafts by chains, in place.

    Args:
        tokens: [len(rows) * places] of a batch.
        mask: [len(rows) * places * places].
        rows: the draft of each request; an empty one keeps SGLang's own.
        places: how many places a request has.
    """
    chain = np.tri(places, dtype=mask.dtype)
    in_rows, in_squares = tokens.reshape(-1, places), mask.reshape(-1, places, places)
    for number, row in enumerate(rows):
        if len(row):
            draft = row[: places - 1]
            in_rows[number, 1:] = draft[-1]
            in_rows[number, 1 : 1 + len(draft)] = draft
            in_squares[number] = chain
