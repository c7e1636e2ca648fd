"""`histospec status ENDPOINT`: is a server well, which shards does it know, and does drafting pay?"""

import argparse
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from histospec.client.channel import metadata, open_channel
from histospec.client.config import Endpoint, Tls, configure
from histospec.client.errors import ConfigurationError
from histospec.server.arguments import ArgumentParser
from histospec.server.config import Address
from histospec.server.errors import ConfigError
from histospec.server.interceptors import SERVICE
from histospec.v1 import draft_pb2 as pb
from histospec.v1 import draft_pb2_grpc as pb_grpc

METRICS_PORT = 9464


def main(argv: Sequence[str]) -> int:
    """Prints the shards and the main counters; returns 0 when every shard serves, else 1."""
    parser = ArgumentParser(prog="histospec status", description="Show how a draft server is doing.")
    parser.add_argument("endpoint", metavar="HOST:PORT", help="gRPC address of any shard")
    parser.add_argument("--http", metavar="HOST:PORT", help=f"where its /metrics is (default: port {METRICS_PORT})")
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="file that holds a bearer token (or set HISTOSPEC_TOKEN_FILE)",
    )
    parser.add_argument("--tls-ca", metavar="FILE", help="authorities of the server's certificate; switches TLS on")
    parser.add_argument("--tls-cert", metavar="FILE", help="a certificate to show, where the server asks for one")
    parser.add_argument("--tls-key", metavar="FILE", help="its key")
    parser.add_argument("--timeout", metavar="SECONDS", type=float, default=5.0, help="default: 5")
    options = parser.parse_args(list(argv))
    try:
        endpoint = Address.parse(options.endpoint)
        http = Address.parse(options.http) if options.http else endpoint._replace(port=METRICS_PORT)
    except ValueError as error:
        raise ConfigError(str(error)) from None

    try:
        connection = _Connection(options)
    except ConfigurationError as error:
        raise ConfigError(str(error)) from None
    try:
        shards = connection.topology(str(endpoint))
    except grpc.RpcError as error:
        text = f"histospec status: {endpoint} cannot be reached ({_details(error)}); is the server running there?"
        Console(stderr=True, soft_wrap=True).print(text, highlight=False, markup=False)
        return 1
    states = [connection.health(shard.address) for shard in shards]
    console = Console()
    console.print(_shard_table(shards, states))
    try:
        console.print(_counter_table(_metrics(http, options.timeout)))
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        console.print(f"no counters: {http} does not answer; say where /metrics is with --http", highlight=False)
    return 0 if all(state == "SERVING" for state in states) else 1


class _Connection:
    """How to reach shards."""

    def __init__(self, options: argparse.Namespace) -> None:
        tls = Tls(options.tls_ca, options.tls_cert, options.tls_key) if options.tls_ca or options.tls_cert else None
        self._config = configure("any:1", "any", tls=tls)  # as a client's; the addresses are given with each call
        if options.token_file is not None:
            self._config = replace(self._config, token=None, token_file=options.token_file)
        self._timeout = options.timeout
        metadata(self._config)  # raises now what it would raise later

    def topology(self, address: str) -> list[pb.Shard]:
        """The shards that this one knows. Raises grpc.RpcError."""
        with open_channel(grpc, Endpoint(address, address), self._config) as channel:
            stub = pb_grpc.DraftServiceStub(channel)
            answer = stub.Topology(pb.TopologyRequest(), timeout=self._timeout, metadata=metadata(self._config))
        for shard in answer.shards:
            if shard.listening:  # it knows where it listens, such as 0.0.0.0, and not how it is reached
                shard.address = address
        return list(answer.shards)

    def health(self, address: str) -> str:
        """SERVING, or what else is the case."""
        with open_channel(grpc, Endpoint(address, address), self._config) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=self._timeout)
            except grpc.RpcError as error:
                return _details(error)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def _metrics(http: Address, timeout: float) -> dict[tuple[str, str], float]:
    """Samples summed over namespaces, by name and result."""
    with urllib.request.urlopen(f"http://{http}/metrics", timeout=timeout) as response:
        text = response.read().decode()
    samples: dict[tuple[str, str], float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name.removeprefix("histospec_"), sample.labels.get("result", "")] += sample.value
    return samples


def _shard_table(shards: list[pb.Shard], states: list[str]) -> Table:
    table = Table("shard", "address", "health")
    for shard, state in zip(shards, states, strict=True):
        table.add_row(shard.name, shard.address, f"[{'green' if state == 'SERVING' else 'red'}]{state}[/]")
    return table


def _counter_table(samples: dict[tuple[str, str], float]) -> Table:
    hits, misses = samples["problem_lookups_total", "hit"], samples["problem_lookups_total", "miss"]
    drafted, accepted = samples["draft_tokens_total", ""], samples["accepted_tokens_total", ""]
    rows = {
        "open sessions": f"{samples['sessions', '']:,.0f}",
        "sessions opened on a known problem": _share(hits, hits + misses),
        "drafted tokens accepted": _share(accepted, drafted),
        "tokens generated": f"{samples['generated_tokens_total', '']:,.0f}",
        "tokens of history": f"{samples['history_tokens', '']:,.0f}",
        "index": f"{samples['index_bytes', ''] / (1 << 20):,.1f} MiB",
        "store errors": f"{samples['store_errors_total', '']:,.0f}",
    }
    table = Table("since its start", "")
    table.columns[1].justify = "right"
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _share(part: float, whole: float) -> str:
    return f"{part:,.0f} of {whole:,.0f} ({part / whole:.0%})" if whole else "none"


def _details(error: grpc.RpcError) -> str:
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return str(error)
