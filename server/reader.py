"""What a server says over HTTP of how it does, read from elsewhere."""

import http.client
import json
import urllib.request
from typing import Any, cast

from histospec.server.config import Address
from histospec.server.errors import Unavailable

METRICS_PORT = 9464


def read_status(address: Address, timeout: float) -> dict[str, Any]:
    """What `/status` answers, as `Overview.show` describes it. Raises Unavailable."""
    try:
        with urllib.request.urlopen(f"http://{address}/status", timeout=timeout) as answer:
            status = json.load(answer)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unavailable(f"{address} does not say how it does ({error})") from None
    if not isinstance(status, dict) or "totals" not in status:
        raise Unavailable(f"{address} is no HistoSpec server")
    return cast(dict[str, Any], status)
