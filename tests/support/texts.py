"""Responses as plain lists of tokens, to be compared with what was written."""

from collections.abc import Iterable

import numpy as np

from histospec.client import Response


def texts(responses: Iterable[Response]) -> list[list[int]]:
    """The tokens of each, in their order."""
    return [np.asarray(response.tokens).tolist() for response in responses]
