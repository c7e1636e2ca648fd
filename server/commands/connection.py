"""Options and look-ups that commands share to reach a running service: token, certificates and the list of shards."""

import argparse
import asyncio
from dataclasses import replace

import grpc
import grpc.aio

from histospec.client.config import Config, Endpoint, Tls, configure
from histospec.client.errors import ConfigurationError
from histospec.client.errors import HistoSpecError as ClientError
from histospec.client.transport.channel import metadata
from histospec.client.transport.discovery import resolve, topology
from histospec.server.errors import ConfigError, Unavailable

ENDPOINT = "gRPC address of any shard, a list of them, or discover://HOST:PORT"

SERVICE = "HOST:PORT[,...], or discover://HOST:PORT to find all of them"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the token and the certificates."""
    parser.add_argument(
        "--token-file", metavar="FILE", help="file that holds a bearer token (or set HISTOSPEC_TOKEN_FILE)"
    )
    parser.add_argument("--tls-ca", metavar="FILE", help="authorities of the server's certificate; enables TLS")
    parser.add_argument("--tls-cert", metavar="FILE", help="client certificate, if the server asks for one")
    parser.add_argument("--tls-key", metavar="FILE", help="key of --tls-cert")


OPTIONS = ("token_file", "tls_ca", "tls_cert", "tls_key")


def caller(endpoint: str, options: argparse.Namespace) -> Config:
    """Returns the client configuration for an endpoint and these options. Raises ConfigError."""
    given = {name: getattr(options, name, None) for name in OPTIONS}
    try:
        ca, certificate = given["tls_ca"], given["tls_cert"]
        tls = Tls(ca, certificate, given["tls_key"]) if ca or certificate else None
        config = configure(endpoint, "any", tls=tls)
        if given["token_file"] is not None:
            config = replace(config, token=None, token_file=given["token_file"])
        metadata(config)  # check now what later calls need
        if config.tls is not None:
            config.tls.credentials()
    except ConfigurationError as error:
        raise ConfigError(str(error)) from None
    return config


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
            reasons.append(f"{endpoint.address} cannot be reached ({_words(answer)})")
        elif isinstance(answer, BaseException):
            raise answer
    if not shards:
        raise Unavailable(f"{' and '.join(reasons)}")
    known = {shard.address for shard in shards.values()}
    return list(shards.values()), [endpoint for endpoint in silent if endpoint.address not in known]


def _words(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error)
