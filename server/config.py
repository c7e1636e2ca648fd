"""One frozen, checked configuration; nothing else in the server reads the environment, but for OpenTelemetry its own.

Every option is a flag, an environment variable and a key of the TOML file: `--drain-seconds 5`,
`HISTOSPEC_DRAIN_SECONDS=5`, `drain-seconds = 5`. A flag wins over the environment, which wins over the file.
"""

import argparse
import ipaddress
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

from pydantic import (
    BeforeValidator,
    ByteSize,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, InitSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from histospec.protocol.limits import DEFAULT_MAX_DRAFT, MAX_DRAFT, MAX_NAMESPACE
from histospec.server.arguments import ArgumentParser, shown
from histospec.server.errors import ConfigError
from histospec.server.security.small_files import read_text
from histospec.server.stores.group_commit import MAX_BACKLOG
from histospec.server.stores.interface import HISTORY_RESPONSES
from histospec.server.stores.redis.location import SCHEMES, Location

PREFIX = "HISTOSPEC_"
MAX_SHARD_NAME = 253  # characters, as a DNS name has
MAX_BYTES = 1 << 47  # what a process can address
MAX_COUNT = (1 << 31) - 1
LONGEST = 300  # characters of a sentence: it repeats the wrong value
C = TypeVar("C", bound="StoreConfig")


class Address(NamedTuple):
    """Where a socket listens or connects."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: object) -> "Address":
        """Reads `host:port` or `[v6]:port`. Raises ValueError with a sentence that says what is wrong."""
        if isinstance(text, Address):
            return text
        host, colon, port = str(text).strip().rpartition(":")
        if not colon or not host:
            raise ValueError(f"write HOST:PORT, for example 127.0.0.1:6378, not {str(text)!r}")
        if not (port.isascii() and port.isdecimal()) or len(port) > 5 or int(port) > 65535:
            raise ValueError(f"the port must be a number from 0 to 65535, not {port!r}")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise ValueError(f"write an IPv6 address in brackets, for example [::1]:{port}, not {str(text)!r}")
        return cls(host, int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Peer(NamedTuple):
    """Another shard, as clients reach it."""

    name: str
    address: Address

    @classmethod
    def parse(cls, text: object) -> "Peer":
        """Reads `host:port` (its own name) or `name=host:port`."""
        if isinstance(text, Peer):
            return text
        name, _, address = str(text).strip().rpartition("=")
        parsed = Address.parse(address)
        return cls(name or str(parsed), parsed)


def _peers(value: object) -> tuple[Peer, ...]:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, Sequence):
        raise ValueError("write a list such as a:6378,b:6378")
    peers = tuple(Peer.parse(item) for item in items if str(item).strip())
    if items and not peers:
        raise ValueError(f"{value!r} names no shard; write a list such as a:6378,b:6378, or leave it out")
    names = [peer.name for peer in peers]
    if len(set(names)) < len(names):
        raise ValueError("each shard may be named once")
    return peers


_BYTE_SIZE = TypeAdapter(ByteSize)


def _bytes(value: object) -> object:
    """Says how to write a size, before pydantic says only that it cannot read it."""
    try:
        size = int(_BYTE_SIZE.validate_python(value))
    except (ValidationError, OverflowError, ValueError):
        raise ValueError(f"{value!r} is not a size; write a number with a unit, for example 8GiB or 512MiB") from None
    if size > MAX_BYTES:
        raise ValueError(f"{value!r} is more than a process can address; give at most 128TiB")
    return size


def _file(value: object) -> Path | None:
    """A file that ends: a device may not."""
    if value is None:
        return None
    path = Path(str(value))
    if path.is_char_device() or path.is_block_device():
        raise ValueError(f"{path} is a device; give a file")
    return path


def _collector(value: object) -> Address | None:
    if value is None or isinstance(value, Address):
        return value
    scheme, _, address = str(value).partition("://")
    if scheme != "otlp":
        raise ValueError(f"write otlp://HOST:PORT, for example otlp://127.0.0.1:4317, not {str(value)!r}")
    return Address.parse(address)


# NoDecode: the text of a variable is for our parsers, not JSON.
Where = Annotated[Address, NoDecode, PlainValidator(Address.parse)]
Shards = Annotated[tuple[Peer, ...], NoDecode, PlainValidator(_peers)]
Collector = Annotated[Address | None, NoDecode, PlainValidator(_collector)]
Bytes = Annotated[int, BeforeValidator(_bytes)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
File = Annotated[Path | None, PlainValidator(_file)]


class StoreConfig(BaseSettings):
    """What is kept, and where: the options of every command that opens the store."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", env_ignore_empty=True)

    data_dir: Path = Field(Path("histospec-data"), description="directory of the store; made when absent")
    store: str = Field(
        "sqlite",
        description="where responses survive a restart: sqlite, or redis://HOST:PORT, or redis+cluster://HOST:PORT,... "
        "(rediss for TLS; ?replicas=1 waits for a replica)",
    )
    history_epochs: Count = Field(8, description="newest epochs kept for each problem")
    history_responses: Count = Field(HISTORY_RESPONSES, description="newest responses kept for each problem")
    retention: Annotated[float, Field(ge=0, le=36500)] = Field(
        0.0,
        description="days after which a problem that nobody wrote to is forgotten, such as 30 or 0.5; 0 for never; the "
        "same on all shards",
    )
    disk: Bytes | None = Field(
        None,
        description="how large the SQLite file may become, for example 100GiB; the write-ahead log beside it comes on "
        "top, usually less than 100MiB",
    )
    max_backlog: Bytes = Field(
        MAX_BACKLOG,
        description="what may wait for the store, for example 256MiB; beyond it, ingests and commits are refused",
    )

    @field_validator("data_dir", mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        if not str(value) or "\0" in str(value):
            raise ValueError(
                "must not be empty; give a directory" if not str(value) else "must not hold a NUL character"
            )
        return value

    @field_validator("store")
    @classmethod
    def _known_store(cls, value: str) -> str:
        if value.split(":")[0] in SCHEMES:
            Location.parse(value)
        elif value != "sqlite":
            raise ValueError("there is no such store; use sqlite, redis://HOST:PORT or redis+cluster://HOST:PORT,...")
        return value

    @field_validator("disk", "max_backlog")
    @classmethod
    def _some_room(cls, value: int | None) -> int | None:
        if value is not None and value < 1 << 20:
            raise ValueError("give the store at least 1MiB")
        return value

    @model_validator(mode="after")
    def _a_file(self) -> "StoreConfig":
        if self.disk is not None and self.store != "sqlite":
            raise ValueError("--disk: limits the file of --store sqlite; what Redis holds is limited by its maxmemory")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags and file arrive together in `load`; the environment stands between them."""
        flags = init_settings()
        file = flags.pop("_file", {})
        return (
            InitSettingsSource(settings_cls, init_kwargs=flags),
            env_settings,
            InitSettingsSource(settings_cls, init_kwargs=file),
        )


class Config(StoreConfig):
    """All options of `histospec serve`."""

    # Where
    listen: Where = Field(Address("127.0.0.1", 6378), description="gRPC address, HOST:PORT; port 0 takes a free one")
    http: Where = Field(
        Address("127.0.0.1", 9464), description="address of the status page, /metrics, /livez, /readyz and /healthz"
    )
    tls_cert: File = Field(None, description="certificate chain of the server, PEM; switches TLS on")
    tls_key: File = Field(None, description="key of that certificate, PEM")
    tls_client_ca: File = Field(
        None, description="authorities that sign clients' certificates, PEM; asks for one (mTLS)"
    )
    tokens: File = Field(None, description="file of bearer tokens and what each may do, TOML; asks for one")
    insecure: bool = Field(False, description="allow listening beyond loopback without tokens or clients' certificates")
    shard_name: str = Field(
        "",
        description="stable name of this shard, which places its problems, so it must survive restarts (default: the "
        "--listen address)",
    )
    peers: Shards = Field(
        (),
        description="all shards of this service as clients reach them, [NAME=]HOST:PORT, comma-separated; an entry "
        "with the name of this shard stands for it",
    )

    specrl_namespace: Annotated[str, Field(max_length=MAX_NAMESPACE)] = Field(
        "specrl", description="namespace of what SpecRL's updater sends; --specrl-namespace= takes nothing from it"
    )

    # What is kept in the index
    memory: Bytes = Field(8 << 30, description="budget of the index, for example 8GiB")
    namespace_tokens: Annotated[int, Field(ge=0, le=1 << 30)] = Field(
        1 << 19,
        description="text that the index over all problems of a namespace holds, in tokens of about 15 bytes, within "
        "--memory: it drafts where a problem has no history; 0 for none",
    )

    # How it drafts
    threads: Annotated[int, Field(ge=0, le=64)] = Field(
        0,
        description="threads that draft for one batch of 32 sessions or more, 0 for two where the process may use two "
        "CPUs; what they draft does not depend on it",
    )

    # Limits: what one caller may ask for
    max_message: Bytes = Field(64 << 20, description="longest message taken, for example 64MiB")
    max_prompt_tokens: Count = Field(1 << 20, description="longest prompt in tokens")
    max_session_tokens: Count = Field(
        1 << 20, description="most tokens that one session may generate, and of one ingested response"
    )
    max_batch: Count = Field(
        4096, description="most sessions in a step, opens or closes in a message, responses in an ingest"
    )
    max_draft_tokens: Annotated[int, Field(ge=1, le=MAX_DRAFT)] = Field(
        DEFAULT_MAX_DRAFT, description="longest draft that a step may ask for, at most 1024"
    )
    max_namespaces: Count = Field(4096, description="most namespaces; each costs memory for as long as it is there")
    max_sessions_per_stream: Count = Field(65536, description="most open sessions on one stream")

    # How it stops and what it says
    drain_seconds: Annotated[float, Field(ge=0, le=86400)] = Field(
        20.0, description="how long open streams may go on after SIGTERM, at most a day"
    )
    log_format: Literal["auto", "pretty", "json"] = Field(
        "auto", description="auto, pretty or json; auto is pretty on a terminal"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe log line shown: debug, info, warning or error"
    )
    traces: Collector = Field(
        None,
        description="OpenTelemetry collector that gets a span of each call, otlp://HOST:PORT; needs histospec[otel]",
    )

    @field_validator("memory")
    @classmethod
    def _some_memory(cls, value: int) -> int:
        if value < 1 << 20:
            raise ValueError("give the index at least 1MiB")
        return value

    @field_validator("shard_name")
    @classmethod
    def _a_name(cls, value: str) -> str:
        if len(value) > MAX_SHARD_NAME:
            raise ValueError(f"has {len(value)} characters; give at most {MAX_SHARD_NAME}")
        if not value.isprintable():
            raise ValueError(f"{value!r} holds characters that cannot be printed; give a name such as shard-0")
        return value

    @field_validator("max_message")
    @classmethod
    def _message_fits(cls, value: int) -> int:
        if not 1 << 10 <= value <= 1 << 30:
            raise ValueError("must be from 1KiB to 1GiB")
        return value

    @model_validator(mode="after")
    def _guarded(self) -> "Config":
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key: a certificate needs its key, and a key its certificate")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("--tls-client-ca: clients show certificates only over TLS; give --tls-cert and --tls-key")
        guarded = self.tokens is not None or self.tls_client_ca is not None or self.insecure
        for flag, address in (("--listen", self.listen), ("--http", self.http)):
            if not address.is_loopback and not guarded:
                raise ValueError(
                    f"{flag} {address}: listening beyond loopback lets anyone who reaches the port read and write; "
                    "give --tokens or --tls-client-ca, add --insecure to allow it, or listen on 127.0.0.1"
                )
        return self


def load(argv: Sequence[str], prog: str = "histospec serve") -> Config:
    """The configuration that flags, environment and file add up to.

    Raises ConfigError with one sentence that names the option and where its value came from.
    """
    return settle(Config, vars(parser(Config, prog, "Start a draft server.").parse_args(list(argv))))


def settle(kind: type[C], flags: dict[str, Any]) -> C:
    """The configuration of a kind that these flags, environment and file add up to. Raises ConfigError as `load`."""
    path = flags.pop("config", None) or os.environ.get(f"{PREFIX}CONFIG")
    file = _read(Path(path)) if path else {}
    mine = {name: value for name, value in file.items() if name in kind.model_fields}
    values: dict[str, Any] = {**flags, "_file": mine}
    try:
        return kind(**values)
    except ValidationError as error:
        raise ConfigError(_sentence(error, flags, path)) from None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _read(path: Path) -> dict[str, Any]:
    """The keys of a TOML file, spelled as fields."""
    try:
        content = tomllib.loads(read_text(path))
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror}); give a readable TOML file") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--config {path}: is not TOML: {error}") from None
    keys = {key: key.replace("-", "_") for key in content}
    for key, name in keys.items():
        if name not in Config.model_fields:
            raise ConfigError(f"--config {path}: there is no option {key!r}; see histospec serve --help")
    if len(set(keys.values())) < len(keys):
        raise ConfigError(f"--config {path}: an option is given twice, once with - and once with _")
    return {keys[key]: value for key, value in content.items()}


def _sentence(error: ValidationError, flags: Mapping[str, object], path: object) -> str:
    """The first thing that is wrong, in one sentence."""
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return message
    name = str(first["loc"][0])
    variable = PREFIX + name.upper()
    source = "" if name in flags else f" (from {variable})" if os.environ.get(variable) else f" (from {path})"
    if first["type"] != "value_error":
        message = f"{message[0].lower()}{message[1:]}, is {first['input']!r}"
    if len(message) > LONGEST:
        message = f"{message[: LONGEST // 2]} … {message[-LONGEST // 2 :]}"
    return f"{_flag(name)}{source}: {message}"


def default_of(name: str, kind: type[StoreConfig] | None = None) -> str:
    """The default of an option as it would be written on a command line; "" where there is none."""
    field = (kind or Config).model_fields[name]
    if field.default in ("", (), None):
        return ""
    size = any(isinstance(part, BeforeValidator) and part.func is _bytes for part in field.metadata)
    return (
        shown(field.default)
        if size
        else f"{field.default:g}"
        if isinstance(field.default, float)
        else str(field.default)
    )


def parser(kind: type[StoreConfig], prog: str, description: str) -> ArgumentParser:
    """A parser of the flags of a kind of configuration; what is not given is absent from what it parses."""
    parser = ArgumentParser(
        prog=prog,
        description=description,
        epilog=f"Every option is also an environment variable ({PREFIX}LISTEN for --listen) and a key of the --config "
        "file (listen). A flag wins over the environment, the environment over the file.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE.toml", help="read options from a TOML file")
    for name, field in kind.model_fields.items():
        help_ = str(field.description)
        if field.annotation is bool:
            parser.add_argument(_flag(name), action=argparse.BooleanOptionalAction, help=help_)
            continue
        if default := default_of(name, kind):
            help_ += f" (default: {default})"
        parser.add_argument(_flag(name), metavar=name.split("_")[-1].upper(), help=help_.replace("%", "%%"))
    return parser
