"""The client's configuration, as immutable values. No other module of the client reads the environment.

Arguments of the constructor take precedence over the environment:

======================= ===========================================================================
HISTOSPEC_ENDPOINT      addresses of the shards, `host:6378,host2:6378`; or with names, `a=host:6378,b=host2:6378`;
                        or an address at which to discover them, `discover://host:6378`
HISTOSPEC_NAMESPACE     the training run, or model and tokenizer; the histories of two namespaces never mix
HISTOSPEC_DEADLINE      deadline of a step in seconds, at most 60; default 0.02
HISTOSPEC_LEAVE_SECONDS seconds after which the problems of a shard that `discover://` no longer finds move to the other
                        shards, at most 86400; default 30. Choose more than a shard takes to restart
HISTOSPEC_TOKEN         bearer token
HISTOSPEC_TOKEN_FILE    file with the bearer token; the client reads it for every connection, so the token may change
HISTOSPEC_TLS_CA        PEM file with the authorities that sign the server's certificate; switches TLS on
HISTOSPEC_TLS_CERT      PEM file with the client's own certificate (mTLS)
HISTOSPEC_TLS_KEY       PEM file with the key of that certificate
HISTOSPEC_REHEARSE      `0`: send no empty step shortly before a step is due. `1` (default): the blocking client does,
                        so that caches hold what the step needs; it takes a millisecond of CPU time per step
HISTOSPEC_RECORD        file to which the client appends every finished response as a line for `histospec replay`; it
                        contains prompts and responses in plain text; a new file has mode 0600
======================= ===========================================================================
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import grpc

from histospec.client import arguments
from histospec.client.errors import ConfigurationError
from histospec.protocol.costs import DEFAULT_DEADLINE
from histospec.protocol.limits import MAX_NAMESPACE
from histospec.protocol.names import white_space
from histospec.protocol.redaction import file_name

T = TypeVar("T")

DISCOVER = "discover://"
LONGEST_FILE = 16 << 20
"""The most bytes of a token or certificate file."""
LONGEST_DEADLINE = 60.0
"""Seconds. A worker waits this long if the server hangs. A larger value is a mistake, such as milliseconds."""
MAX_ENDPOINT = 1 << 20
"""The most characters of an endpoint, enough for thousands of shards."""
USUAL_PORT = 6378
LONGEST_ADDRESS = 300
"""The most characters of one address that a server names; a name of DNS has 253."""
UNPAIRED = "tls: a client certificate needs its key, and a key its certificate"
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/?#@\[\]]+):[0-9]{1,5}")


def _checked(check: Callable[..., T], *values: Any) -> T:
    try:
        return check(*values)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None


@dataclass(frozen=True)
class Timeouts:
    """Timeouts of the client, in seconds: above 0 and at most a day."""

    step: float = DEFAULT_DEADLINE
    """Deadline of a step, from `send` on. A longer deadline suits slower servers. A worker waits at most this long per
    step, and only until the breaker opens. HISTOSPEC_DEADLINE."""
    call: float = 10.0
    """For History, PredictLength, Topology and DropNamespace, which no step waits for."""
    ingest: float = 60.0
    """For Ingest, which waits for the store's disk."""
    keep: float = 5.0
    """For `keep`, with all of its calls: a trainer waits this long while a server hangs, once a minute, and a tenth of
    it in between. A server that answers needs far less, except while its disk is slow."""
    silence: float = 2.0
    """If a stream sends nothing for this long while steps miss their deadline, the client closes it and connects again.
    A connection attempt that takes longer is also started again, so this must be longer than connecting takes."""
    shutdown: float = 1.0
    """How long `shutdown` waits for acknowledgements of the last commits."""
    discovery: float = 10.0
    """Interval at which a client with `discover://` looks for shards."""
    leave: float = 30.0
    """With `discover://`: if neither DNS nor another shard has named a shard for this long, the shard has left, and its
    problems move to the others. Choose more than a restart takes, because moving problems away and back costs more than
    a moment without their drafts. HISTOSPEC_LEAVE_SECONDS."""

    def __post_init__(self) -> None:
        for each in fields(self):
            _checked(arguments.seconds, f"Timeouts.{each.name}", getattr(self, each.name))


@dataclass(frozen=True)
class Breaker:
    """Settings of each shard's circuit breaker, which keeps steps from waiting for a shard that does not answer."""

    failures: int = 3
    """After this many unanswered steps in a row the breaker opens: steps return at once instead of waiting."""
    cooldown: float = 0.25
    """Seconds until the first retry. The time doubles after every failed retry, up to a maximum."""
    cooldown_max: float = 5.0
    """Maximum for a shard that is connected but answers too late. A retry is then a step, which waits for the shard."""
    reconnect: float = 0.5
    """Maximum for a shard that is not connected. A retry is then a connection attempt, and no step waits for it."""
    jitter: float = 0.25
    """Random extension of each wait, as a fraction of it, so that a thousand workers do not retry at one moment."""

    def __post_init__(self) -> None:
        _checked(arguments.whole, "Breaker.failures", self.failures, 1, 1 << 31)
        _checked(arguments.seconds, "Breaker.cooldown", self.cooldown)
        _checked(arguments.seconds, "Breaker.cooldown_max", self.cooldown_max)
        _checked(arguments.seconds, "Breaker.reconnect", self.reconnect)
        if self.cooldown_max < self.cooldown:
            raise ConfigurationError(
                f"Breaker.cooldown_max: {self.cooldown_max} is less than Breaker.cooldown, {self.cooldown}; raise it"
            )
        _checked(arguments.number, "Breaker.jitter", self.jitter, 0, 1)


@dataclass(frozen=True)
class Limits:
    """Limits on what the client keeps and sends."""

    commits: int = 10_000
    """How many finished responses of all shards the client keeps until they are acknowledged. Each shard has an equal
    share and may use what the others leave. Beyond the limit the client drops the oldest response of the shard that is
    furthest over its share, and counts it."""
    commit_bytes: int = 256 << 20
    """The same limit in bytes of their tokens, prompts and logprobs."""
    message_bytes: int = 4 << 20
    """Bytes of a message. A single session may need more. The client uses the server's limit if that is lower."""
    batch: int = 4096
    """Sessions in one message. The client uses the server's limit if that is lower, and splits larger batches."""

    def __post_init__(self) -> None:
        for name, least in (("commits", 0), ("commit_bytes", 0), ("message_bytes", 1), ("batch", 1)):
            _checked(arguments.whole, f"Limits.{name}", getattr(self, name), least, 1 << 62, f"[{least}, 2^62]")


@dataclass(frozen=True)
class Tls:
    """Certificates for TLS, as paths of PEM files."""

    ca: str | os.PathLike[str] | None = None
    """Authorities that sign the server's certificate; None: those of the system."""
    certificate: str | os.PathLike[str] | None = None
    """The client's own certificate, for a server that requires one; None: no certificate."""
    key: str | os.PathLike[str] | None = None
    """The key of that certificate."""

    def __post_init__(self) -> None:
        for each in fields(self):
            path = getattr(self, each.name)
            if not (path is None or isinstance(path, str | os.PathLike)):
                raise ConfigurationError(f"Tls.{each.name}: must be the path of a file, is {arguments.shown(path)}")
        if (self.certificate is None) != (self.key is None):
            raise ConfigurationError(UNPAIRED)

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files and returns gRPC credentials."""
        return grpc.ssl_channel_credentials(
            *(None if path is None else _read("tls", path) for path in (self.ca, self.key, self.certificate))
        )


@dataclass(frozen=True)
class Endpoint:
    """One shard of the endpoint."""

    name: str
    """Stable name of the shard, which determines its problems. Without a name, the address."""
    address: str
    """host:port"""
    certified: str | None = None
    """The host name in its certificate, if that differs from the address."""


@dataclass(frozen=True)
class Config:
    """The whole configuration of one client."""

    endpoints: tuple[Endpoint, ...]
    """All shards; with `discover`, the addresses at which to discover them."""
    namespace: str
    discover: bool = False
    """Whether to discover the shards at the endpoints."""
    token: str | None = field(default=None, repr=False)
    token_file: str | None = None
    tls: Tls | None = None
    timeouts: Timeouts = Timeouts()
    breaker: Breaker = Breaker()
    limits: Limits = Limits()
    rehearse: bool = True
    """Whether the blocking client rehearses steps (`transport/rehearsal`)."""
    record: str | None = None
    """The file to which the client appends every finished response, for `histospec replay`."""


def configure(
    endpoint: str | None = None,
    namespace: str | None = None,
    *,
    token: str | None = None,
    tls: Tls | bool | None = None,
    deadline: float | None = None,
    timeouts: Timeouts | None = None,
    breaker: Breaker | None = None,
    limits: Limits | None = None,
) -> Config:
    """Returns the configuration from the arguments and the environment.

    Raises:
        ConfigurationError: a setting is missing or malformed; the message says what to set.
    """
    _, where = _given("endpoint", endpoint, "the server's address", "host:6378,host2:6378", MAX_ENDPOINT)
    source, run = _given("namespace", namespace, "the name of the training run", "run-1", MAX_NAMESPACE)
    if wrong := white_space(run):
        raise ConfigurationError(f"{source}: {wrong}")
    for name, value, kind in (
        ("timeouts", timeouts, Timeouts),
        ("breaker", breaker, Breaker),
        ("limits", limits, Limits),
    ):
        if value is not None:
            _checked(arguments.instance, name, value, kind, f"give histospec.client.{kind.__name__}(...)")
    if timeouts is None:
        timeouts = Timeouts()
        if text := os.environ.get("HISTOSPEC_LEAVE_SECONDS"):
            seconds = _checked(arguments.seconds, "HISTOSPEC_LEAVE_SECONDS", _as_number(text))
            timeouts = replace(timeouts, leave=seconds)
    if deadline is not None:
        timeouts = replace(timeouts, step=_deadline("deadline", deadline))
    elif text := os.environ.get("HISTOSPEC_DEADLINE"):
        timeouts = replace(timeouts, step=_deadline("HISTOSPEC_DEADLINE", _as_number(text)))
    return Config(
        endpoints=_endpoints(where.removeprefix(DISCOVER)),
        namespace=run,
        discover=where.startswith(DISCOVER),
        token=_token("token", token) or _token("HISTOSPEC_TOKEN", os.environ.get("HISTOSPEC_TOKEN")) or None,
        token_file=os.environ.get("HISTOSPEC_TOKEN_FILE") or None,
        tls=_tls(tls),
        timeouts=timeouts,
        breaker=breaker or Breaker(),
        limits=limits or Limits(),
        rehearse=switch("HISTOSPEC_REHEARSE", default=True),
        record=os.environ.get("HISTOSPEC_RECORD") or None,
    )


def _given(name: str, value: Any, what: str, example: str, most: int) -> tuple[str, str]:
    """Returns an argument, or else its environment variable: the name of the one that is set, and its text."""
    source = name
    if value is None or (isinstance(value, str) and not value):
        source = f"HISTOSPEC_{name.upper()}"
        value = os.environ.get(source)
        if not value:
            raise ConfigurationError(f"{name}: pass {what}, such as {example!r}, or set {source}")
    if not isinstance(value, str):
        raise ConfigurationError(f"{name}: must be a string, such as {example!r}; is {arguments.shown(value)}")
    return source, _checked(arguments.text, source, value, most)


def _deadline(name: str, value: Any) -> float:
    seconds = _checked(arguments.seconds, name, value)
    if seconds > LONGEST_DEADLINE:
        raise ConfigurationError(
            f"{name}: {seconds:g} seconds are more than the limit of {LONGEST_DEADLINE:g}, try 0.02"
        )
    return seconds


def switch(name: str, default: bool) -> bool:
    """Returns whether a variable is 1; `default` if it is empty. Raises ConfigurationError for anything but 0 and 1."""
    text = os.environ.get(name, "")
    if text not in ("", "0", "1"):
        raise ConfigurationError(f"{name}: must be 0 or 1, is {arguments.shown(text)}")
    return default if not text else text == "1"


def _as_number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _token(name: str, value: Any) -> str | None:
    """Checks that a bearer token fits into a header. Error messages do not contain the token."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise ConfigurationError(f"{name}: must be a string, is {type(value).__name__}")
    if value != value.strip():
        raise ConfigurationError(f"{name}: begins or ends with white space or a line break; remove it")
    wrong = next((i for i, letter in enumerate(value) if not " " <= letter <= "~"), None)
    if wrong is not None:
        raise ConfigurationError(f"{name}: character {wrong + 1} is not printable ASCII; correct the token")
    return value


def _tls(value: Any) -> Tls | None:
    """Returns the certificates of the argument, or else of the environment."""
    if value is None:
        return tls_files()
    if isinstance(value, bool):
        return Tls() if value else None
    if not isinstance(value, Tls):
        file = f"; for a file of authorities give Tls(ca={arguments.shown(value)})" if isinstance(value, str) else ""
        raise ConfigurationError(f"tls: must be True, False or a Tls, is {arguments.shown(value)}{file}")
    return value


def tls_files(ca: str | None = None, cert: str | None = None, key: str | None = None) -> Tls | None:
    """Returns the certificates that options of a command name, each of them else its variable; None without any.

    Raises ConfigurationError, which names the option or variable of a certificate without its key, or the reverse.
    """
    options = {"ca": ca, "cert": cert, "key": key}
    files = {name: path or os.environ.get(f"HISTOSPEC_TLS_{name.upper()}") or None for name, path in options.items()}
    if (files["cert"] is None) != (files["key"] is None):
        lone = "key" if files["cert"] is None else "cert"
        source = f"--tls-{lone}" if options[lone] else f"HISTOSPEC_TLS_{lone.upper()}"
        raise ConfigurationError(f"{UNPAIRED}; only {source} is given")
    return Tls(*files.values()) if any(files.values()) else None


def bearer(config: Config) -> str | None:
    """Returns the bearer token, or None if there is none.

    Raises:
        ConfigurationError: the token file cannot be read.
    """
    if config.token is not None or config.token_file is None:
        return config.token
    content = _read("HISTOSPEC_TOKEN_FILE", config.token_file).strip()
    return _token("HISTOSPEC_TOKEN_FILE", content.decode("ascii", "replace"))


def _endpoints(text: str) -> tuple[Endpoint, ...]:
    endpoints = []
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, address = part.rpartition("=")
        if "@" in name or not _ADDRESS.fullmatch(address) or (equals and not name):
            what = arguments.shown(part)
            raise ConfigurationError(
                f"endpoint: {what} is not of the form host:port or name=host:port{_advice(address)}"
            )
        if wrong := white_space(name):
            raise ConfigurationError(f"endpoint: the shard name {wrong}")
        if not _is_port(address):
            raise ConfigurationError(f"endpoint: the port of {arguments.shown(part)} is outside [1, 65535]")
        endpoints.append(Endpoint(name or address, address))
    if not endpoints:
        raise ConfigurationError(f"endpoint: {arguments.shown(text)} names no address")
    if len({e.name for e in endpoints}) < len(endpoints):
        raise ConfigurationError(f"endpoint: a shard is named twice in {arguments.shown(text)}")
    return tuple(endpoints)


def _advice(address: str) -> str:
    """Returns what to change of an address that is none, for the end of a sentence; empty if that is not known."""
    if "://" in address:
        return "; give no URL, but the host and the port of gRPC"
    if address.count(":") > 1 and "[" not in address:
        return f"; put an IPv6 address in brackets, such as [::1]:{USUAL_PORT}"
    if ":" not in address.rpartition("]")[2]:
        return f"; add the port, usually :{USUAL_PORT}"
    return ""


def is_address(text: str) -> bool:
    """Returns whether a text is an address of TCP: host:port or [v6]:port."""
    return len(text) <= LONGEST_ADDRESS and _ADDRESS.fullmatch(text) is not None and _is_port(text)


def _is_port(address: str) -> bool:
    return 0 < int(address.rpartition(":")[2]) < 1 << 16


def _read(name: str, path: str | os.PathLike[str]) -> bytes:
    try:
        with Path(path).open("rb") as file:
            content = file.read(LONGEST_FILE + 1)
    except OSError as error:
        raise ConfigurationError(f"{name}: cannot read {file_name(path)}: {error.strerror}") from None
    if len(content) > LONGEST_FILE:
        raise ConfigurationError(
            f"{name}: {file_name(path)} is longer than {LONGEST_FILE >> 20} MiB; give a PEM file or a token file"
        )
    return content
