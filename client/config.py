"""Everything that can be set, in small values that do not change; nothing else in the client reads the environment.

What is given to the constructor wins over the environment:

======================= ===========================================================================
HISTOSPEC_ENDPOINT      addresses of the shards, `host:6378,host2:6378`, or named, `a=host:6378,b=host2:6378`;
                        or where to find them: `discover://host:6378`
HISTOSPEC_NAMESPACE     the training run, or model and tokenizer; histories of two namespaces never mix
HISTOSPEC_DEADLINE      seconds that a step may take, 0.02 unless told
HISTOSPEC_TOKEN         bearer token
HISTOSPEC_TOKEN_FILE    file that holds it, read for every connection, so that it may change
HISTOSPEC_TLS_CA        file with the authorities that may sign the server's certificate; switches TLS on
HISTOSPEC_TLS_CERT      file with the client's own certificate (mTLS)
HISTOSPEC_TLS_KEY       file with the key of that certificate
HISTOSPEC_RECORD        file to which every finished response is appended as a line for `histospec replay`; it holds
                        prompts and responses in clear; a new file has mode 0600
======================= ===========================================================================
"""

import math
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc

from histospec.client.errors import ConfigurationError
from histospec.protocol.costs import DEFAULT_DEADLINE
from histospec.protocol.limits import MAX_NAMESPACE

DISCOVER = "discover://"
LONGEST_FILE = 16 << 20
"""Bytes of a token or a certificate."""


@dataclass(frozen=True)
class Timeouts:
    """How long the client waits, in seconds."""

    step: float = DEFAULT_DEADLINE
    """A step's drafts, from `send` on. Longer waits for slower servers; a worker loses at most this much a step, and
    only until the breaker opens."""
    call: float = 10.0
    """History, PredictLength, Topology and DropNamespace. They are not on a worker's path."""
    ingest: float = 60.0
    """Ingest, which waits for the store's disk."""
    silence: float = 2.0
    """A stream that has not said a word for so long, while steps ran into their deadline, is given up and its
    connection made anew. Shorter than connecting and reopening the sessions takes, it would never get anywhere."""
    shutdown: float = 1.0
    """How long `shutdown` waits for the last commits to be acknowledged."""
    discovery: float = 10.0
    """Between two looks at which shards there are, where they are found by `discover://`."""
    leave: float = 30.0
    """A shard that nobody has named for so long is one no more, and its problems go to the others. Longer than a
    restart takes: moving problems away and back costs more than doing without their drafts for a moment."""


@dataclass(frozen=True)
class Breaker:
    """When to stop asking a shard that does not answer, and when to try again."""

    failures: int = 3
    """Steps in a row without an answer, until steps return at once instead of waiting."""
    cooldown: float = 0.25
    """Seconds until the next try. It doubles with every try that fails ..."""
    cooldown_max: float = 5.0
    """... up to this: the longest that workers go without drafts after the server is back."""
    jitter: float = 0.25
    """Fraction by which a cool-down may be longer, so that a thousand workers do not come back in one instant."""


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


@dataclass(frozen=True)
class Tls:
    """Certificates, as PEM files; what is None is the system's own, or not there."""

    ca: str | None = None
    """Authorities that may have signed the server's certificate; None: those of the system."""
    certificate: str | None = None
    """The client's own certificate, where the server asks for one."""
    key: str | None = None
    """The key of that certificate."""

    def credentials(self) -> grpc.ChannelCredentials:
        """The files, read."""
        if (self.certificate is None) != (self.key is None):
            raise ConfigurationError("tls: a client certificate needs its key, and a key its certificate")
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
    endpoint = endpoint or os.environ.get("HISTOSPEC_ENDPOINT", "")
    namespace = namespace or os.environ.get("HISTOSPEC_NAMESPACE", "")
    if not endpoint:
        raise ConfigurationError("endpoint: pass the server's address, 'host:6378', or set HISTOSPEC_ENDPOINT")
    if not namespace:
        raise ConfigurationError("namespace: pass the name of the training run, or set HISTOSPEC_NAMESPACE")
    if len(namespace) > MAX_NAMESPACE:
        raise ConfigurationError(f"namespace: {len(namespace)} characters are more than the limit of {MAX_NAMESPACE}")
    timeouts = timeouts or Timeouts()
    if deadline is None and "HISTOSPEC_DEADLINE" in os.environ:
        deadline = _seconds("HISTOSPEC_DEADLINE", os.environ["HISTOSPEC_DEADLINE"])
    if deadline is not None:
        timeouts = replace(timeouts, step=_seconds("deadline", deadline))
    if tls is None:
        ca, certificate, key = (os.environ.get(f"HISTOSPEC_TLS_{name}") for name in ("CA", "CERT", "KEY"))
        tls = Tls(ca, certificate, key) if ca or certificate else None
    elif isinstance(tls, bool):
        tls = Tls() if tls else None
    where = endpoint.removeprefix(DISCOVER)
    return Config(
        endpoints=_endpoints(where),
        namespace=namespace,
        discover=where != endpoint,
        token=token or os.environ.get("HISTOSPEC_TOKEN") or None,
        token_file=os.environ.get("HISTOSPEC_TOKEN_FILE") or None,
        tls=tls,
        timeouts=timeouts,
        breaker=breaker or Breaker(),
        limits=limits or Limits(),
        record=os.environ.get("HISTOSPEC_RECORD") or None,
    )


def bearer(config: Config) -> str | None:
    """The token to show; None: there is none.

    Raises:
        ConfigurationError: the file that should hold it cannot be read.
    """
    if config.token is not None or config.token_file is None:
        return config.token
    return _read("HISTOSPEC_TOKEN_FILE", config.token_file).decode().strip()


def _endpoints(text: str) -> tuple[Endpoint, ...]:
    endpoints = []
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, address = part.rpartition("=")
        if not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):[0-9]{1,5}", address) or (equals and not name):
            raise ConfigurationError(f"endpoint: {part!r} is not of the form host:port or name=host:port")
        endpoints.append(Endpoint(name or address, address))
    if not endpoints:
        raise ConfigurationError(f"endpoint: {text!r} names no address")
    if len({e.name for e in endpoints}) < len(endpoints):
        raise ConfigurationError(f"endpoint: a shard is named twice in {text!r}")
    return tuple(endpoints)


def _seconds(name: str, value: float | str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not (0 < seconds < math.inf):
        raise ConfigurationError(f"{name}: {value!r} is not a number of seconds above 0")
    return seconds


def _read(name: str, path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            content = file.read(LONGEST_FILE + 1)
    except OSError as error:
        raise ConfigurationError(f"{name}: cannot read {path}: {error.strerror}") from error
    if len(content) > LONGEST_FILE:
        raise ConfigurationError(f"{name}: {path} is longer than {LONGEST_FILE >> 20} MiB; give a PEM or token file")
    return content
