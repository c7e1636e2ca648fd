"""One frozen, checked configuration: every option with its type, default, help text and rules.

`options.py` reads the values; nothing else in the server reads the environment, but for OpenTelemetry its own.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from histospec.protocol.limits import DEFAULT_MAX_DRAFT, MAX_DRAFT, MAX_NAMESPACE
from histospec.protocol.names import white_space
from histospec.server.machine import memory_limit
from histospec.server.settings.addresses import Address
from histospec.server.settings.budget import default_budget
from histospec.server.settings.option_types import Bytes, Collector, Count, File, Shards, Where
from histospec.server.stores.group_commit import MAX_BACKLOG
from histospec.server.stores.interface import HISTORY_RESPONSES
from histospec.server.stores.redis.location import SCHEMES, Location

PREFIX = "HISTOSPEC_"
MAX_SHARD_NAME = 253  # characters, as a DNS name has


class StoreConfig(BaseSettings):
    """What is kept, and where: the options of every command that opens the store."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", env_ignore_empty=True)

    data_dir: Path = Field(Path("histospec-data"), description="directory of the store; made when absent")
    store: str = Field(
        "sqlite",
        description="where responses survive a restart: sqlite, or redis://HOST:PORT, or redis+cluster://HOST:PORT,... "
        "(rediss for TLS; ?replicas=1 waits for a replica; ?ca=FILE names who signed its certificate)",
    )
    store_file: File = Field(
        None,
        description="file that holds the URL of the store, in place of --store: for a password, which the server reads "
        "again when the file changes",
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
        description="how large the SQLite file may become, for example 100GiB, 0 for no limit; the write-ahead log "
        "beside it comes on top, usually less than 100MiB",
        json_schema_extra={"default": "90 % of the volume of --data-dir"},
    )
    upgrade_copy: bool = Field(
        True,
        description="keep a copy of the SQLite file before a change of its schema that older servers could not read; "
        "--no-upgrade-copy does without",
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
    def _some_room(cls, value: int | None, info: ValidationInfo) -> int | None:
        unlimited = info.field_name == "disk" and value == 0
        if value is not None and value < 1 << 20 and not unlimited:
            raise ValueError("give the store at least 1MiB")
        return value

    @model_validator(mode="after")
    def _one_store(self) -> "StoreConfig":
        if self.store_file is not None and "store" in self.model_fields_set:
            raise ValueError("--store and --store-file: both say where the store is; give one of them")
        if self.disk is not None and self.kind != "sqlite":
            raise ValueError("--disk: limits the file of --store sqlite; what Redis holds is limited by its maxmemory")
        return self

    @property
    def kind(self) -> str:
        """What the store is, without where: sqlite, or the scheme of a URL; redis where a file holds the URL."""
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
        """Flags and file arrive together from `options.settle`; the environment stands between them."""
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
    memory: Bytes = Field(
        default_factory=lambda: default_budget(memory_limit()),
        description="budget of the index, for example 8GiB; the process needs more, see docs/run-a-server.md#memory",
        json_schema_extra={"default": "8GiB, or what fits the memory of the control group or machine"},
    )
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
            raise ValueError("--tls-client-ca: clients show certificates only over TLS; give --tls-cert and --tls-key")
        guarded = self.tokens is not None or self.tls_client_ca is not None or self.insecure
        for flag, address in (("--listen", self.listen), ("--http", self.http)):
            if not address.is_loopback and not guarded:
                raise ValueError(
                    f"{flag} {address}: listening beyond loopback lets anyone who reaches the port read and write; "
                    "give --tokens or --tls-client-ca, add --insecure to allow it, or listen on 127.0.0.1"
                )
        return self
