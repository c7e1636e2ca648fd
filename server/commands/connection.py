"""What commands share to reach a running service: options, the list of shards, and `/status` over HTTP."""

import argparse
import asyncio
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import grpc
import grpc.aio

from histospec.client.config import Config, Endpoint, configure, tls_files
from histospec.client.errors import ConfigurationError
from histospec.client.errors import HistoSpecError as ClientError
from histospec.client.transport.channel import metadata
from histospec.client.transport.diagnosis import BY_THE_SERVER, diagnose
from histospec.client.transport.discovery import resolve, topology
from histospec.server.errors import ConfigError, Unavailable
from histospec.server.settings.addresses import Address
from histospec.server.settings.config import PREFIX

ENDPOINT = "gRPC address of any shard, a list of them, or discover://HOST:PORT"
SERVICE = "HOST:PORT[,...], or discover://HOST:PORT to find all of them"
OPTIONS = ("token_file", "tls_ca", "tls_cert", "tls_key")
HTTP_PORT = 9464
LONGEST = 64 << 20  # bytes of an answer of `/status`


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the token and the certificates."""
    for name, help_ in (
        ("--token-file", "file that holds a bearer token (or set HISTOSPEC_TOKEN_FILE)"),
        ("--tls-ca", "authorities of the server's certificate; enables TLS (or set HISTOSPEC_TLS_CA)"),
        ("--tls-cert", "client certificate, if the server asks for one (or set HISTOSPEC_TLS_CERT)"),
        ("--tls-key", "key of that certificate (or set HISTOSPEC_TLS_KEY)"),
    ):
        parser.add_argument(name, metavar="FILE", default=None, help=help_)


def caller(endpoint: str | None, options: argparse.Namespace) -> Config:
    """Returns the client configuration for an endpoint and these options, each else its variable. Raises ConfigError.

    `endpoint`: None takes HISTOSPEC_ENDPOINT.
    """
    try:
        config = configure(endpoint, "any", tls=tls_files(options.tls_ca, options.tls_cert, options.tls_key))
        if options.token_file is not None:
            config = replace(config, token=None, token_file=options.token_file)
        metadata(config)  # check now what later calls need
        if config.tls is not None:
            config.tls.credentials()
    except ConfigurationError as error:
        raise ConfigError(str(error)) from None
    return config


def files(options: Mapping[str, Any], names: Iterable[str] = OPTIONS) -> list[tuple[str, str | None]]:
    """Returns the files that options of these names, or else their variables, name, each with its source.

    The files are inputs for `keep_apart`.
    """
    flags = [(f"--{name.replace('_', '-')}", options.get(name)) for name in names]
    variables = [f"{PREFIX}{name.upper()}" for name in names]
    return [
        (variable, os.environ.get(variable)) if path is None else (flag, path)
        for (flag, path), variable in zip(flags, variables, strict=True)
    ]


async def find(config: Config, timeout: float) -> tuple[list[Endpoint], list[Endpoint]]:
    """Asks the endpoints for the shards that they know. Returns the shards, and the endpoints that do not answer.

    Waits `timeout` seconds for each endpoint. Raises Unavailable if none answers.
    """
    listed = list(config.endpoints)
    reasons = []
    if config.discover:
        found = await asyncio.gather(*map(resolve, listed), return_exceptions=True)
        reasons = [
            f"{seed.address} cannot be resolved ({e})"
            for seed, e in zip(listed, found, strict=True)
            if isinstance(e, OSError)
        ]
        listed = [endpoint for some in found if isinstance(some, list) for endpoint in some]
    answers = await asyncio.gather(*(topology(end, config, timeout) for end in listed), return_exceptions=True)
    shards: dict[str, Endpoint] = {}
    silent = []
    for endpoint, answer in zip(listed, answers, strict=True):
        if isinstance(answer, list):
            shards |= {shard.name: shard for shard in answer}
        elif isinstance(answer, grpc.RpcError | ClientError):
            silent.append(endpoint)
            reasons.append(f"{endpoint.address} cannot be reached: {await _reason(endpoint, answer, config, timeout)}")
        elif isinstance(answer, BaseException):
            raise answer
    if not shards:
        raise Unavailable(f"{' and '.join(reasons)}")
    known = {shard.address for shard in shards.values()}
    return list(shards.values()), [endpoint for endpoint in silent if endpoint.address not in known]


async def _reason(endpoint: Endpoint, error: grpc.RpcError | ClientError, config: Config, timeout: float) -> str:
    """Returns why an endpoint does not answer, and what to do, in the words of the doctor."""
    if isinstance(error, grpc.aio.AioRpcError) and error.code() not in BY_THE_SERVER:
        trouble = await asyncio.to_thread(diagnose, endpoint.address, config.tls, timeout, endpoint.certified)
        if trouble is not None:
            return f"{trouble.text}; {trouble.advice}"
    return _words(error)


def _words(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error)


def http_addresses(text: str | None) -> list[Address]:
    """Returns the addresses that `--http` lists. Raises ConfigError."""
    try:
        return [Address.parse(one) for one in (text or "").split(",") if one.strip()]
    except ValueError as error:
        raise ConfigError(f"--http: {error}") from None


async def read_status(address: Address, timeout: float) -> dict[str, Any]:
    """Returns the answer of `/status`, which `Overview.show` describes. Raises Unavailable after `timeout` seconds."""
    import aiohttp  # a fifth of the command's start: it reads the system's certificates

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
