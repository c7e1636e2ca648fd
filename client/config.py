"""Everything that can be set, in small values that do not change; nothing else in the client reads the environment.

What is given to the constructor wins over the environment:

======================= ===========================================================================
HISTOSPEC_ENDPOINT      addresses of the shards, `host:6378,host2:6378`, or named, `a=host:6378,b=host2:6378`;
                        or where to find them: `discover://host:6378`
HISTOSPEC_NAMESPACE     the training run, or model and tokenizer; histories of two namespaces never mix
HISTOSPEC_DEADLINE      seconds that a step may take, 0.02 unless told, at most 60
HISTOSPEC_LEAVE_SECONDS seconds after which the problems of a shard that `discover://` no longer finds go to the others,
                        30 unless told, at most 86400. Longer than a shard takes to restart
HISTOSPEC_TOKEN         bearer token
HISTOSPEC_TOKEN_FILE    file that holds it, read for every connection, so that it may change
HISTOSPEC_TLS_CA        file with the authorities that may sign the server's certificate; switches TLS on
HISTOSPEC_TLS_CERT      file with the client's own certificate (mTLS)
HISTOSPEC_TLS_KEY       file with the key of that certificate
HISTOSPEC_RECORD        file to which every finished response is appended as a line for `histospec replay`; it holds
                        prompts and responses in clear; a new file has mode 0600
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

T = TypeVar("T")

DISCOVER = "discover://"
LONGEST_FILE = 16 << 20
"""Bytes of a token or a certificate."""
LONGEST_DEADLINE = 60.0
"""Seconds. A worker waits for so long when the server hangs: more is a slip, such as milliseconds."""
MAX_ENDPOINT = 1 << 20
"""Characters of an endpoint: thousands of shards."""


def _checked(check: Callable[..., T], *values: Any) -> T:
    try:
        return check(*values)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None


@dataclass(frozen=True)
class Timeouts:
    """How long the client waits, in seconds: above 0 and at most a day."""

    step: float = DEFAULT_DEADLINE
    """A step's drafts, from `send` on. Longer waits for slower servers; a worker loses at most this much a step, and
    only until the breaker opens."""
    call: float = 10.0
    """History, PredictLength, Topology and DropNamespace. They are not on a worker's path."""
    ingest: float = 60.0
    """Ingest, which waits for the store's disk."""
    silence: float = 2.0
    """A stream that has not said a word for so long, while steps ran into their deadline, is given up and its
    connection made anew; so is a connection that is not made in this time. Shorter than connecting takes, it would
    never get anywhere."""
    shutdown: float = 1.0
    """How long `shutdown` waits for the last commits to be acknowledged."""
    discovery: float = 10.0
    """Between two looks at which shards there are, where they are found by `discover://`."""
    leave: float = 30.0
    """Where shards are found by `discover://`: a shard that neither DNS nor another shard has named for so long has
    left, and its problems go to the others. Longer than a restart takes: moving problems away and back costs more than
    doing without their drafts for a moment. HISTOSPEC_LEAVE_SECONDS."""

    def __post_init__(self) -> None:
        for each in fields(self):
            _checked(arguments.seconds, f"Timeouts.{each.name}", getattr(self, each.name))


@dataclass(frozen=True)
class Breaker:
    """When to stop asking a shard that does not answer, and when to try again."""

    failures: int = 3
    """Steps in a row without an answer, until steps return at once instead of waiting."""
    cooldown: float = 0.25
    """Seconds until the next try. It doubles with every try that fails ..."""
    cooldown_max: float = 5.0
    """... up to this, where a shard is there and answers too late: a try is a step that waits for it."""
    reconnect: float = 0.5
    """... and up to this, where a shard is away: a try is a connection, and no step waits for it."""
    jitter: float = 0.25
    """Fraction by which a cool-down may be longer, so that a thousand workers do not come back in one instant."""

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
    """What the client keeps and sends at most."""

    commits: int = 10_000
    """Finished responses of all shards that are kept until they are acknowledged. Each shard has an equal share and may
    use what others leave. Beyond the limit, the shard furthest over its share loses its oldest, which is counted."""
    commit_bytes: int = 256 << 20
    """The same, in bytes of their tokens, prompts and logprobs."""
    message_bytes: int = 4 << 20
    """Bytes of a message, where one session alone does not take more. A server may take less, and says so."""
    batch: int = 4096
    """Sessions in one message. A server may take fewer, and says so; larger batches are split."""

    def __post_init__(self) -> None:
        for name, least in (("commits", 0), ("commit_bytes", 0), ("message_bytes", 1), ("batch", 1)):
            _checked(arguments.whole, f"Limits.{name}", getattr(self, name), least, 1 << 62, f"[{least}, 2^62]")


@dataclass(frozen=True)
class Tls:
    """Certificates, as PEM files; what is None is the system's own, or not there."""

    ca: str | os.PathLike[str] | None = None
    """Authorities that may have signed the server's certificate; None: those of the system."""
    certificate: str | os.PathLike[str] | None = None
    """The client's own certificate, where the server asks for one."""
    key: str | os.PathLike[str] | None = None
    """The key of that certificate."""

    def __post_init__(self) -> None:
        for each in fields(self):
            path = getattr(self, each.name)
            if not (path is None or isinstance(path, str | os.PathLike)):
                raise ConfigurationError(f"Tls.{each.name}: must be the path of a file, is {arguments.shown(path)}")
        if (self.certificate is None) != (self.key is None):
            raise ConfigurationError("tls: a client certificate needs its key, and a key its certificate")

    def credentials(self) -> grpc.ChannelCredentials:
        """The files, read."""
        return grpc.ssl_channel_credentials(
            *(None if path is None else _read("tls", path) for path in (self.ca, self.key, self.certificate))
        )


@dataclass(frozen=True)
class Endpoint:
    """One shard as the client was told of it."""

    name: str
    """Stable: problems are placed by it. The address, unless one was given."""
    address: str
    """host:port"""
    certified: str | None = None
    """The host name in its certificate, where that is not the one in the address."""


@dataclass(frozen=True)
class Config:
    """The whole configuration of one client."""

    endpoints: tuple[Endpoint, ...]
    """All shards; or, where they are to be found, the addresses to ask."""
    namespace: str
    discover: bool = False
    """Whether the endpoints are only where to ask for the shards."""
    token: str | None = field(default=None, repr=False)
    token_file: str | None = None
    tls: Tls | None = None
    timeouts: Timeouts = Timeouts()
    breaker: Breaker = Breaker()
    limits: Limits = Limits()
    record: str | None = None
    """The file to which every finished response is appended, for `histospec replay`."""


def configure(
    endpoint: str | None = None,
    namespace: str | None = None,
    token: str | None = None,
    tls: Tls | bool | None = None,
    deadline: float | None = None,
    timeouts: Timeouts | None = None,
    breaker: Breaker | None = None,
    limits: Limits | None = None,
) -> Config:
    """The configuration that arguments and environment add up to.

    Raises:
        ConfigurationError: something is missing or malformed; the sentence says what to set.
    """
    _, where = _given("endpoint", endpoint, "the server's address", "host:6378,host2:6378", MAX_ENDPOINT)
    said, run = _given("namespace", namespace, "the name of the training run", "run-1", MAX_NAMESPACE)
    if wrong := white_space(run):
        raise ConfigurationError(f"{said}: {wrong}")
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
        record=os.environ.get("HISTOSPEC_RECORD") or None,
    )


def _given(name: str, value: Any, what: str, example: str, most: int) -> tuple[str, str]:
    """An argument, or else its variable: which of the two, and its text."""
    said = name
    if value is None or (isinstance(value, str) and not value):
        said = f"HISTOSPEC_{name.upper()}"
        value = os.environ.get(said)
        if not value:
            raise ConfigurationError(f"{name}: pass {what}, such as {example!r}, or set {said}")
    if not isinstance(value, str):
        raise ConfigurationError(f"{name}: must be a string, such as {example!r}; is {arguments.shown(value)}")
    return said, _checked(arguments.text, said, value, most)


def _deadline(name: str, value: Any) -> float:
    seconds = _checked(arguments.seconds, name, value)
    if seconds > LONGEST_DEADLINE:
        raise ConfigurationError(
            f"{name}: {seconds:g} seconds are more than the limit of {LONGEST_DEADLINE:g}, try 0.02"
        )
    return seconds


def _as_number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _token(name: str, value: Any) -> str | None:
    """A bearer token that fits a header. Errors do not repeat it."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise ConfigurationError(f"{name}: must be a string, is {type(value).__name__}")
    if value != value.strip():
        raise ConfigurationError(f"{name}: begins or ends with white space or a line break; remove it")
    wrong = next((i for i, letter in enumerate(value) if not " " <= letter <= "~"), None)
    if wrong is not None:
        raise ConfigurationError(f"{name}: character {wrong + 1} is not printable ASCII; a token holds nothing else")
    return value


def _tls(value: Any) -> Tls | None:
    """What the argument says, or else the environment."""
    if value is None:
        ca, certificate, key = (os.environ.get(f"HISTOSPEC_TLS_{name}") or None for name in ("CA", "CERT", "KEY"))
        return Tls(ca, certificate, key) if ca or certificate or key else None
    if isinstance(value, bool):
        return Tls() if value else None
    if not isinstance(value, Tls):
        file = f"; for a file of authorities give Tls(ca={arguments.shown(value)})" if isinstance(value, str) else ""
        raise ConfigurationError(f"tls: must be True, False or a Tls, is {arguments.shown(value)}{file}")
    return value


def bearer(config: Config) -> str | None:
    """The token to show; None: there is none.

    Raises:
        ConfigurationError: the file that should hold it cannot be read.
    """
    if config.token is not None or config.token_file is None:
        return config.token
    content = _read("HISTOSPEC_TOKEN_FILE", config.token_file).strip()
    return _token("HISTOSPEC_TOKEN_FILE", content.decode("ascii", "replace"))


def _endpoints(text: str) -> tuple[Endpoint, ...]:
    endpoints = []
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, address = part.rpartition("=")
        if not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):[0-9]{1,5}", address) or (equals and not name):
            what = arguments.shown(part)
            raise ConfigurationError(f"endpoint: {what} is not of the form host:port or name=host:port")
        if wrong := white_space(name):
            raise ConfigurationError(f"endpoint: the shard name {wrong}")
        if not 0 < int(address.rpartition(":")[2]) < 1 << 16:
            raise ConfigurationError(f"endpoint: the port of {arguments.shown(part)} is outside [1, 65535]")
        endpoints.append(Endpoint(name or address, address))
    if not endpoints:
        raise ConfigurationError(f"endpoint: {arguments.shown(text)} names no address")
    if len({e.name for e in endpoints}) < len(endpoints):
        raise ConfigurationError(f"endpoint: a shard is named twice in {arguments.shown(text)}")
    return tuple(endpoints)


def _read(name: str, path: str | os.PathLike[str]) -> bytes:
    try:
        with Path(path).open("rb") as file:
            content = file.read(LONGEST_FILE + 1)
    except OSError as error:
        raise ConfigurationError(f"{name}: cannot read {path}: {error.strerror}") from error
    if len(content) > LONGEST_FILE:
        raise ConfigurationError(f"{name}: {path} is longer than {LONGEST_FILE >> 20} MiB; give a PEM or token file")
    return content
