"""Puts drafts into the places that SGLang verifies: a fixed number per request, the first of them its last token.

SGLang takes a batch's places as two flat arrays: the tokens, and a mask that says for each place which others it
follows. A draft is a chain, in which each place follows the one before; its mask is a lower triangle. With branches, a
place at the end of the row may instead hold the runner-up of a token of the chain: it follows the same place as that
token. SGLang verifies whichever of both is right (as in SpecInfer, arXiv:2305.09781). A row never has one token twice
after the same place: SGLang's sampling would count its probability twice.

Places that nothing fills repeat the chain's last token: SGLang verifies them in any case. They continue the chain, so a
wrong one is rejected like any token, and the output stays exact.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from histospec.client import Draft

NONE = -1  # no token


def choose(drafts: Sequence[Draft | None], places: int, vocabulary: int) -> NDArray[np.int64]:
    """Returns what fills the places of each request: the tokens that are most probable to be reached.

    Args:
        drafts: the draft of each of B requests, or None. Those with runners-up get branches.
        places: how many places a request has.
        vocabulary: runners-up from this token on are left out.

    Returns:
        int64[2, B, places - 1]: the tokens, and the place that each follows. First the chain, then NONE where a draft
        has too few tokens, then the branches.
    """
    most = places - 1
    tokens = np.full((len(drafts), 2, most), NONE, np.int64)
    probs = np.zeros((len(drafts), 2, most))
    for row, draft in enumerate(drafts):
        if draft is None:
            continue
        for which, (given, likely) in enumerate(((draft.tokens, draft.probs), draft.runners_up or ((), ()))):
            tokens[row, which, : len(given)] = given[:most]
            probs[row, which, : len(given)] = likely[:most]
    tokens[tokens >= vocabulary] = NONE
    reached = probs[:, 0].cumprod(1)
    before = np.ones_like(reached)
    before[:, 1:] = reached[:, :-1]
    worth = np.concatenate((reached, before * probs[:, 1] * (tokens[:, 1] != NONE)), 1)
    chosen = np.sort(np.argsort(-worth, axis=1, kind="stable")[:, :most], axis=1)
    return np.stack((np.take_along_axis(tokens.reshape(len(drafts), -1), chosen, 1), chosen % max(most, 1)))


def put(tokens: NDArray[np.int64], mask: NDArray[np.integer], chosen: NDArray[np.int64], places: int) -> None:
    """Replaces SGLang's own drafts, in place.

    Args:
        tokens: [B * places] of a batch.
        mask: [B * places * places].
        chosen: what `choose` returned. A request without a token keeps SGLang's own drafts.
        places: how many places a request has.
    """
    mine = np.flatnonzero((chosen[0] != NONE).any(1))
    given, follows = chosen[:, mine]
    in_chain = follows == np.arange(places - 1)
    last = ((given != NONE) & in_chain).sum(1, keepdims=True) - 1
    tokens.reshape(-1, places)[mine, 1:] = np.where(given == NONE, np.take_along_axis(given, last, 1), given)
    squares = mask.reshape(-1, places, places)
    squares[mine] = np.tri(places, dtype=mask.dtype)
    rows, at = np.nonzero(~in_chain)
    squares[mine[rows], at + 1] = np.arange(places) <= follows[rows, at, None]
    squares[mine[rows], at + 1, at + 1] = 1
