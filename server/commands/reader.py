"""Reads `/status` of a server over HTTP."""

import asyncio
import json
from typing import Any, cast

import aiohttp

from histospec.server.errors import Unavailable
from histospec.server.settings.addresses import Address

METRICS_PORT = 9464
LONGEST = 64 << 20  # bytes of an answer


async def read_status(address: Address, timeout: float) -> dict[str, Any]:
    """Returns the answer of `/status`, which `Overview.show` describes. Raises Unavailable after `timeout` seconds."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout)) as session,
            session.get(f"http://{address}/status") as answer,
        ):
            text = bytearray()
            async for part in answer.content.iter_chunked(1 << 16):
                text += part
                if len(text) > LONGEST:
                    raise Unavailable(f"{address} is not a HistoSpec server: its answer is too long")
        status = json.loads(text)
    except asyncio.TimeoutError:
        raise Unavailable(f"{address} did not answer /status within {timeout:g} seconds") from None
    except (OSError, aiohttp.ClientError, ValueError, RecursionError) as error:
        raise Unavailable(f"{address} did not answer /status ({error})") from None
    if not isinstance(status, dict) or not status.keys() >= {"shard", "totals", "cpu_seconds"}:
        raise Unavailable(f"{address} is not a HistoSpec server")
    return cast(dict[str, Any], status)
