"""The command line of `histospec doctor`."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from histospec.client.config import Config, bearer, configure, tls_files
from histospec.client.doctor import findings
from histospec.client.doctor.checks import examine
from histospec.client.doctor.facts import Demand, gather
from histospec.client.errors import ConfigurationError
from histospec.protocol.redaction import quoted, unknown_arguments, without_logins


def main(argv: Sequence[str]) -> int:
    """Gathers facts, checks them and prints the findings.

    Returns:
        The exit code: 0 no problem, 1 a problem, 2 wrong arguments or settings.
    """
    try:
        options = _parser().parse_args(list(argv))
        config = _config(options)
    except ConfigurationError as error:
        sys.stderr.write(f"histospec doctor: {error}\n")
        return 2
    demand = Demand(options.draft_tokens, options.sequences)
    facts = asyncio.run(gather(config, demand, options.timeout))
    found = examine(facts)
    sys.stdout.write((findings.as_json if options.json else findings.as_text)(facts, found))
    sys.stdout.flush()
    return int(any(finding.level == "bad" for finding in found))


class _Parser(argparse.ArgumentParser):
    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        options, rest = self.parse_known_args(args, namespace)
        if rest:
            self.error(unknown_arguments(rest))
        return options

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{without_logins(message)}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    usual = Demand()
    parser = _Parser(
        prog="histospec doctor",
        description="Find out why a worker gets no drafts or why its responses are lost, and what to do. Run it where "
        "the worker runs: it reads the same HISTOSPEC_ variables. It leaves nothing behind on the server.",
        epilog="Exit code: 0 no problem, perhaps warnings; 1 a problem; 2 wrong arguments or settings.",
    )
    parser.add_argument(
        "address",
        metavar="ENDPOINT",
        nargs="?",
        help="HOST:PORT[,...] or discover://HOST:PORT (default: HISTOSPEC_ENDPOINT)",
    )
    parser.add_argument("--endpoint", help="the same")
    parser.add_argument("--namespace", help="as HISTOSPEC_NAMESPACE: the name of the run")
    parser.add_argument("--token-file", metavar="FILE", help="as HISTOSPEC_TOKEN_FILE: file with the bearer token")
    parser.add_argument("--tls", action="store_true", help="use TLS, with the authorities of the system")
    parser.add_argument("--tls-ca", metavar="FILE", help="as HISTOSPEC_TLS_CA: authorities of the server's certificate")
    parser.add_argument("--tls-cert", metavar="FILE", help="as HISTOSPEC_TLS_CERT: the client's certificate")
    parser.add_argument("--tls-key", metavar="FILE", help="as HISTOSPEC_TLS_KEY: the key of that certificate")
    parser.add_argument(
        "--draft-tokens",
        metavar="N",
        type=_whole,
        default=usual.draft_tokens,
        help="num_speculative_tokens of vLLM (default: %(default)s)",
    )
    parser.add_argument(
        "--sequences",
        metavar="N",
        type=_whole,
        default=usual.sequences,
        help="max_num_seqs of vLLM (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=_seconds, default=5.0, help="for each call (default: %(default)g)"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as one JSON value")
    return parser


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 1 << 31):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, is {quoted(text)}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 3600:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, above 0 and at most 3600, is {quoted(text)}")
    return seconds


def _config(options: argparse.Namespace) -> Config:
    """Returns the configuration of a worker with these options. Raises ConfigurationError."""
    if None not in (options.address, options.endpoint):
        raise ConfigurationError("--endpoint: there is an ENDPOINT without it; give one of them")
    tls = tls_files(options.tls_ca, options.tls_cert, options.tls_key) or options.tls
    config = configure(options.endpoint if options.address is None else options.address, options.namespace, tls=tls)
    if options.token_file is not None:
        config = replace(config, token=None, token_file=options.token_file)
    bearer(config)  # raises here instead of at each call
    if config.tls is not None:
        config.tls.credentials()
    return config
