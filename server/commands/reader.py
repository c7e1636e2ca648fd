"""What a server says over HTTP of how it does, read from elsewhere."""

import asyncio
import json
from typing import Any, cast

import aiohttp

from histospec.server.errors import Unavailable
from histospec.server.settings.addresses import Address

METRICS_PORT = 9464
LONGEST = 64 << 20  # bytes of an answer


async def read_status(address: Address, timeout: float) -> dict[str, Any]:
    """What `/status` answers within so many seconds, as `Overview.show` describes it. Raises Unavailable."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout)) as session,
            session.get(f"http://{address}/status") as answer,
        ):
            text = bytearray()
            async for part in answer.content.iter_chunked(1 << 16):
                text += part
                if len(text) > LONGEST:
                    raise Unavailable(f"{address} is no HistoSpec server: its answer does not end")
        status = json.loads(text)
    except asyncio.TimeoutError:
        raise Unavailable(f"{address} does not say how it does within {timeout:g} seconds") from None
    except (OSError, aiohttp.ClientError, ValueError, RecursionError) as error:
        raise Unavailable(f"{address} does not say how it does ({error})") from None
    if not isinstance(status, dict) or not status.keys() >= {"shard", "totals", "cpu_seconds"}:
        raise Unavailable(f"{address} is no HistoSpec server")
    return cast(dict[str, Any], status)
