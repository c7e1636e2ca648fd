"""`histospec status [ENDPOINT]`: shows the health of all shards and the gain from drafts."""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import grpc.aio
from rich.console import Console

from histospec.client.config import Config, Endpoint
from histospec.client.errors import HistoSpecError as ClientError
from histospec.client.transport.channel import open_channel
from histospec.server.arguments import ArgumentParser, amount
from histospec.server.commands import connection
from histospec.server.commands.status_tables import numbers, shard_table
from histospec.server.errors import Unavailable
from histospec.server.observability.shard_health import SERVING, health
from histospec.server.process import run_loop, say
from histospec.server.settings.addresses import Address

PIPED = 200
"""The width in columns without a terminal and without COLUMNS."""


class ShardReport(NamedTuple):
    """One shard and its status."""

    endpoint: Endpoint
    health: str
    status: dict[str, Any] | None
    """The answer of `/status`; None: HTTP does not answer."""


def main(argv: Sequence[str]) -> int:
    """Prints the shards, their main numbers and hints. Returns 0 if every shard serves, else 1."""
    parser = ArgumentParser(prog="histospec status", description="Show the state of a draft service.")
    parser.add_argument(
        "endpoint", metavar="ENDPOINT", nargs="?", help=f"{connection.ENDPOINT} (default: HISTOSPEC_ENDPOINT)"
    )
    parser.add_argument(
        "--http",
        metavar="HOST:PORT[,...]",
        help=f"their HTTP addresses (default: port {connection.HTTP_PORT} of each shard)",
    )
    parser.add_argument(
        "--watch", metavar="SECONDS", type=amount(0, 86_400, above=True), help="refresh at this interval until Ctrl-C"
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON value")
    connection.add_options(parser)
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=amount(0, 3600, above=True), default=5.0, help="default: 5"
    )
    options = parser.parse_args(list(argv))
    config = connection.caller(options.endpoint, options)
    return run_loop(_watch(config, connection.http_addresses(options.http), options))


async def _watch(config: Config, http: Sequence[Address], options: argparse.Namespace) -> int:
    """Shows the shards, repeatedly with --watch. Returns the exit code."""
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED
    console = Console(width=wide)
    while True:
        code = await _show(console, config, http, options)
        if options.watch is None:
            return code
        await asyncio.sleep(options.watch)
        console.clear()


async def _show(console: Console, config: Config, http: Sequence[Address], options: argparse.Namespace) -> int:
    """Prints the state once. Returns the exit code."""
    try:
        shards = await shard_reports(config, http, options.timeout)
    except Unavailable as error:
        say(f"histospec status: {error}")
        return 1
    if options.json:
        rows = [{"name": s.endpoint.name, "address": s.endpoint.address, "health": s.health, "status": s.status}
                for s in shards]  # fmt: skip
        sys.stdout.write(json.dumps({"shards": rows}, indent=1) + "\n")
        sys.stdout.flush()
    else:
        console.print(shard_table([(s.endpoint.name, s.endpoint.address, s.health) for s in shards]))
        for shard in shards:
            if shard.status is not None:
                console.print(numbers(shard.status))
        silent = [shard.endpoint.name for shard in shards if shard.status is None]
        if silent:
            text = f"no status from {', '.join(silent)}: give their HTTP addresses with --http"
            console.print(text, highlight=False, markup=False, soft_wrap=True)
    return 0 if all(shard.health == SERVING for shard in shards) else 1


async def shard_reports(config: Config, http: Sequence[Address], timeout: float) -> list[ShardReport]:
    """Returns reports of all shards of a service: the listed ones, and those that they know.

    `http`: addresses for `/status`; default: the usual port of each shard. Raises Unavailable if no shard answers.
    """
    answering, silent = await connection.find(config, timeout)
    endpoints = [*answering, *silent]
    states = await asyncio.gather(*(_health(endpoint, config, timeout) for endpoint in endpoints))
    addresses = http or dict.fromkeys(Address.parse(e.address)._replace(port=connection.HTTP_PORT) for e in endpoints)
    answers = await asyncio.gather(*(connection.read_status(a, timeout) for a in addresses), return_exceptions=True)
    by_name = {status["shard"]: status for status in answers if isinstance(status, dict)}
    return [ShardReport(end, state, by_name.get(end.name)) for end, state in zip(endpoints, states, strict=True)]


async def _health(endpoint: Endpoint, config: Config, timeout: float) -> str:
    try:
        async with open_channel(grpc.aio, endpoint, config) as channel:
            return await health(channel, timeout)
    except ClientError as error:
        return str(error)
