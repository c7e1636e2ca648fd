"""One frozen, validated configuration: every option with its type, default, help text and rules.

`options.py` reads the values. The rest of the server reads no environment variables, except OpenTelemetry's own.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    ByteSize,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from histospec.protocol.limits import DEFAULT_MAX_DRAFT, MAX_DRAFT, MAX_NAMESPACE
from histospec.protocol.names import white_space
from histospec.protocol.redaction import file_name, quoted
from histospec.server.machine import memory_limit
from histospec.server.settings.addresses import Address, ShardAddress
from histospec.server.settings.budget import default_budget
from histospec.server.stores.group_commit import MAX_BACKLOG
from histospec.server.stores.interface import HISTORY_RESPONSES
from histospec.server.stores.redis.location import SCHEMES, Location

PREFIX = "HISTOSPEC_"
LOGIN = re.compile(":.*@", re.DOTALL)
STORE = frozenset({"store", "store_file"})  # options that name the store
MAX_SHARD_NAME = 253  # characters, the limit of a DNS name
MAX_BYTES = 1 << 47  # the address space of a process
MAX_COUNT = (1 << 31) - 1
HOST = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")


def _shards(value: object) -> tuple[ShardAddress, ...]:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, Sequence):
        raise ValueError("must be a list such as a:6378,b:6378")
    shards = tuple(ShardAddress.parse(item) for item in items if str(item).strip())
    if items and not shards:
        raise ValueError(f"{quoted(value)} names no shard; give a list such as a:6378,b:6378, or omit it")
    names = [shard.name for shard in shards]
    if len(set(names)) < len(names):
        raise ValueError("must name each shard once")
    return shards


def _hosts(value: object) -> tuple[str, ...]:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, Sequence):
        raise ValueError("must be a list such as drafts.example.org,*.rl.svc")
    hosts = tuple(str(item).strip().rstrip(".").lower() for item in items if str(item).strip())
    for host in hosts:
        if not HOST.fullmatch(host):
            raise ValueError(
                f"{quoted(host)} is not a host name; give names without scheme and port, such as drafts.example.org or "
                "*.rl.svc"
            )
    return hosts


_BYTE_SIZE = TypeAdapter(ByteSize)


def _bytes(value: object) -> object:
    """Rejects a wrong size with an example, which pydantic's own error lacks."""
    try:
        size = int(_BYTE_SIZE.validate_python(value))
    except (ValidationError, OverflowError, ValueError):
        raise ValueError(
            f"{quoted(value)} is not a size; give a number with a unit, for example 8GiB or 512MiB"
        ) from None
    if size > MAX_BYTES:
        raise ValueError(f"{quoted(value)} is larger than the address space of a process; give at most 128TiB")
    return size


def _file(value: object) -> Path | None:
    """Returns the path of a file. Rejects devices, which may never end."""
    if value is None:
        return None
    if not isinstance(value, str | Path):
        raise ValueError(f"must be the name of a file, is {quoted(value)}")
    path = Path(value)
    if path.is_char_device() or path.is_block_device():
        raise ValueError(f"{file_name(path)} is a device; give a file")
    return path


def _collector(value: object) -> Address | None:
    if value is None or isinstance(value, Address):
        return value
    scheme, _, address = str(value).partition("://")
    if scheme != "otlp":
        raise ValueError(f"must be otlp://HOST:PORT, for example otlp://127.0.0.1:4317, is {quoted(value)}")
    return Address.parse(address)


# NoDecode: our parsers read the text of a variable; it is not JSON.
Where = Annotated[Address, NoDecode, PlainValidator(Address.parse)]
Shards = Annotated[tuple[ShardAddress, ...], NoDecode, PlainValidator(_shards)]
Hosts = Annotated[tuple[str, ...], NoDecode, PlainValidator(_hosts)]
Collector = Annotated[Address | None, NoDecode, PlainValidator(_collector)]
Bytes = Annotated[int, BeforeValidator(_bytes)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
File = Annotated[Path | None, PlainValidator(_file)]


def is_size(field: FieldInfo) -> bool:
    """Returns whether an option is a number of bytes."""
    return any(isinstance(part, BeforeValidator) and part.func is _bytes for part in field.metadata)


class StoreConfig(BaseSettings):
    """Options of every command that opens the store."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", env_ignore_empty=True)

    data_dir: Path = Field(Path("histospec-data"), description="directory of the store; created if absent")
    store: str = Field(
        "sqlite",
        repr=False,
        description="store of the responses: sqlite, redis://HOST:PORT, or redis+cluster://HOST:PORT,... "
        "(rediss for TLS; ?replicas=1 waits for a replica; ?ca=FILE names the authority that signed its certificate)",
    )
    store_file: File = Field(
        None,
        description="file that holds the URL of the store, instead of --store; for URLs with a password; the server "
        "rereads it when it changes",
    )
    history_epochs: Count = Field(8, description="newest epochs kept for each problem")
    history_responses: Count = Field(HISTORY_RESPONSES, description="newest responses kept for each problem")
    retention: Annotated[float, Field(ge=0, le=36500)] = Field(
        0.0,
        description="days after its last write until a problem is deleted, such as 30 or 0.5; 0 for never; must be the "
        "same on all shards",
    )
    disk: Bytes | None = Field(
        None,
        description="maximum size of the SQLite file, for example 100GiB; 0 for no limit; the write-ahead log is "
        "extra, usually less than 100MiB",
        json_schema_extra={"default": "90 % of what the volume of --data-dir has free, and the file itself"},
    )
    max_backlog: Bytes = Field(
        MAX_BACKLOG,
        description="maximum size of data that waits for the store, for example 256MiB; beyond it, ingests wait and "
        "the server refuses commits for now",
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_secret(cls, value: object, info: ValidationInfo) -> object:
        """Refuses `user:password@` in an option that logs and pages show."""
        if info.field_name != "store" and isinstance(value, str) and LOGIN.search(value):
            raise ValueError("must not hold a user and password; give them in the URL of --store or --store-file")
        return value

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
            raise ValueError("unknown store; use sqlite, redis://HOST:PORT or redis+cluster://HOST:PORT,...")
        return value

    @field_validator("disk", "max_backlog")
    @classmethod
    def _some_room(cls, value: int | None, info: ValidationInfo) -> int | None:
        unlimited = info.field_name == "disk" and value == 0
        if value is not None and value < 1 << 20 and not unlimited:
            raise ValueError("must be at least 1MiB")
        return value

    @model_validator(mode="after")
    def _one_store(self) -> "StoreConfig":
        if self.store_file is not None and "store" in self.model_fields_set:
            raise ValueError("--store and --store-file: both name the store; give only one of them")
        if self.disk is not None and self.kind != "sqlite":
            raise ValueError("--disk: limits the file of --store sqlite; for Redis, set its maxmemory")
        return self

    @property
    def kind(self) -> str:
        """The kind of the store: sqlite, or the scheme of its URL; redis if a file holds the URL."""
        return "redis" if self.store_file is not None else self.store.partition(":")[0]

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Returns the sources by rank. Flags and file arrive together from `options.settle`.

        The first source that names the store, by either option, hides both in the others.
        """
        flags = init_settings()
        file = flags.pop("_file", {})
        sources = [flags, env_settings(), file]
        naming = [i for i, source in enumerate(sources) if not STORE.isdisjoint(source)]
        for i in naming[1:]:
            sources[i] = {name: value for name, value in sources[i].items() if name not in STORE}
        return tuple(InitSettingsSource(settings_cls, init_kwargs=source) for source in sources)


class Config(StoreConfig):
    """All options of `histospec serve`."""

    # Addresses
    listen: Where = Field(Address("127.0.0.1", 6378), description="gRPC address, HOST:PORT; port 0 picks a free one")
    http: Where = Field(
        Address("127.0.0.1", 9464), description="address of the status page, /metrics, /livez, /readyz and /healthz"
    )
    http_hosts: Hosts = Field(
        (),
        description="further host names at which --http answers, comma-separated, such as drafts.example.org or "
        "*.rl.svc; it always answers to IP addresses, localhost, this machine's names and the hosts of --listen, "
        "--http and --peers",
    )
    tls_cert: File = Field(None, description="certificate chain of the server, PEM; enables TLS")
    tls_key: File = Field(None, description="key of --tls-cert, PEM")
    tls_client_ca: File = Field(
        None, description="authorities that sign client certificates, PEM; clients must then show one (mTLS)"
    )
    tokens: File = Field(None, description="file of bearer tokens and their rights, TOML; clients must then send one")
    insecure: bool = Field(False, description="allow listening beyond loopback without tokens or client certificates")
    shard_name: str = Field(
        "",
        description="stable name of this shard, which decides which problems it owns; must survive restarts (default: "
        "the --listen address)",
    )
    peers: Shards = Field(
        (),
        description="all shards of this service at the addresses that clients use, [NAME=]HOST:PORT, comma-separated; "
        "an entry with the name of this shard stands for it",
    )

    specrl_namespace: Annotated[str, Field(max_length=MAX_NAMESPACE)] = Field(
        "specrl", description="namespace for what SpecRL's updater sends; --specrl-namespace= refuses it"
    )

    # The index
    memory: Bytes = Field(
        default_factory=lambda: default_budget(memory_limit()),
        description="memory of the index, for example 8GiB; the process needs more, see docs/run-a-server.md#memory",
        json_schema_extra={"default": "8GiB, or what fits the memory of the control group or machine"},
    )
    namespace_tokens: Annotated[int, Field(ge=0, le=1 << 30)] = Field(
        1 << 19,
        description="size of the index over all problems of a namespace, in tokens of about 16 bytes, part of "
        "--memory; it drafts for problems without a history; 0 for none",
    )

    # Drafting
    threads: Annotated[int, Field(ge=0, le=64)] = Field(
        0,
        description="threads that draft for a batch of 32 sessions or more; 0 for half of the CPUs that the process "
        "may use, two to four of them; the drafts do not depend on it",
    )

    # Limits of one caller
    max_message: Bytes = Field(64 << 20, description="maximum size of a message, for example 64MiB")
    max_prompt_tokens: Count = Field(1 << 20, description="maximum tokens of a prompt")
    max_session_tokens: Count = Field(
        1 << 20, description="maximum tokens that a session may generate, and maximum tokens of an ingested response"
    )
    max_batch: Count = Field(
        4096, description="maximum sessions in a step, opens or closes in a message, and responses in an ingest"
    )
    max_draft_tokens: Annotated[int, Field(ge=1, le=MAX_DRAFT)] = Field(
        DEFAULT_MAX_DRAFT, description="maximum draft tokens that a step may ask for, at most 1024"
    )
    max_namespaces: Count = Field(4096, description="maximum namespaces; each one takes memory until it is deleted")
    max_sessions_per_stream: Count = Field(65536, description="maximum open sessions of a stream")

    # Shutdown, logs and traces
    drain_seconds: Annotated[float, Field(ge=0, le=86400)] = Field(
        20.0, description="seconds that open streams may take to end after SIGTERM, at most a day"
    )
    log_format: Literal["auto", "pretty", "json"] = Field(
        "auto", description="auto, pretty or json; auto is pretty on a terminal"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="lowest level of log lines: debug, info, warning or error"
    )
    traces: Collector = Field(
        None,
        description="OpenTelemetry collector that receives a span per call, otlp://HOST:PORT; needs histospec[otel]",
    )

    @field_validator("memory")
    @classmethod
    def _some_memory(cls, value: int) -> int:
        if value < 1 << 20:
            raise ValueError("must be at least 1MiB")
        return value

    @field_validator("shard_name")
    @classmethod
    def _a_name(cls, value: str) -> str:
        if len(value) > MAX_SHARD_NAME:
            raise ValueError(f"has {len(value)} characters; must have at most {MAX_SHARD_NAME}")
        if not value.isprintable():
            raise ValueError(f"{quoted(value)} has characters that cannot be printed; use a name such as shard-0")
        return value

    @field_validator("shard_name", "specrl_namespace")
    @classmethod
    def _visible(cls, value: str) -> str:
        if value and (wrong := white_space(value)):
            raise ValueError(wrong)
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
            raise ValueError("--tls-client-ca: client certificates need TLS; give --tls-cert and --tls-key")
        guarded = self.tokens is not None or self.tls_client_ca is not None or self.insecure
        for flag, address in (("--listen", self.listen), ("--http", self.http)):
            if not address.is_loopback and not guarded:
                raise ValueError(
                    f"{flag} {address}: beyond loopback, anyone who reaches the port could read and write; give "
                    "--tokens or --tls-client-ca, add --insecure to allow it, or listen on 127.0.0.1"
                )
        return self
