"""Access control: bearer tokens from a file, and their rights.

    [[token]]
    name = "workers"                 # for the log
    secret = "…"                     # or sha256 = "…", the secret's hash in hex, so that the file holds no secret
    namespaces = ["run-*"]           # shell patterns; default: every namespace
    rights = ["read", "write"]       # this is the default; "admin" may also forget namespaces
    shares = {store = "20GiB"}       # of the tenant, see history/tenants

    [[tenant]]                       # a tenant with several tokens, or a part of a token's namespaces
    name = "team-a"
    namespaces = ["a-*"]
    shares = {index = "8GiB", store = "20GiB", namespaces = 100, sessions = 1000}

read: draft, look at histories and lengths. write: commit and ingest. The server rereads the file when it changes. If it
cannot be read, the previous contents stay in force. If a stream's token is gone, or lost the right to read in a
namespace of its sessions, the stream ends with its next message.
"""

import hashlib
import sys
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ByteSize, ConfigDict, Field, ValidationError, model_validator

from histospec.protocol.redaction import file_name
from histospec.server.errors import ConfigError, PermissionDenied, Unauthenticated, reason
from histospec.server.security.watched_files import Watched, read_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

Right = Literal["read", "write", "admin"]
LOOK_SECONDS = 1.0  # between two checks of the file
SHORTEST = 16  # characters of a secret
FINGERPRINT = 8  # hex digits of a digest that messages show: they tell tokens apart, and do not give one away
SET_TOKEN = "set HISTOSPEC_TOKEN"  # what a caller without a token does


def _ascii(secret: str) -> str:
    if not all(" " <= letter <= "~" for letter in secret):
        raise ValueError("must be printable ASCII: no client can send anything else")
    return secret


class _Strict(BaseModel):
    """Takes no unknown keys. pydantic compiles it when it is first used: a server without tokens never does."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True, defer_build=True)


class Shares(_Strict):
    """The most that a tenant may use; None where the file gives nothing."""

    index: ByteSize | None = None
    store: ByteSize | None = None
    namespaces: Annotated[int, Field(ge=0)] | None = None
    sessions: Annotated[int, Field(ge=0)] | None = None


class Tenant(_Strict):
    """Namespaces that share a part of the server."""

    name: Annotated[str, Field(min_length=1)]
    namespaces: Annotated[list[str], Field(min_length=1)]
    """Shell patterns."""
    shares: Shares = Field(default_factory=Shares)

    def has(self, namespace: str) -> bool:
        """Returns whether the namespace is one of these."""
        return any(fnmatchcase(namespace, pattern) for pattern in self.namespaces)


class _Token(_Strict):
    name: str
    secret: Annotated[str, Field(min_length=SHORTEST), AfterValidator(_ascii)] | None = Field(None, repr=False)
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    namespaces: list[str] = ["*"]
    rights: list[Right] = ["read", "write"]
    shares: Shares = Field(default_factory=Shares)

    @model_validator(mode="after")
    def _one_of_two(self) -> "_Token":
        if (self.secret is None) == (self.sha256 is None):
            raise ValueError("give either secret or sha256")
        return self

    def digest(self) -> str:
        """The SHA-256 of the secret, in hex."""
        return self.sha256 or hashlib.sha256((self.secret or "").encode()).hexdigest()


class _File(_Strict):
    token: list[_Token] = []
    tenant: list[Tenant] = []


SECTIONS: dict[str, type[BaseModel]] = {"token": _Token, "tenant": Tenant, "shares": Shares}
KEYS = SECTIONS.keys() | _Token.model_fields.keys() | Tenant.model_fields.keys() | Shares.model_fields.keys()


class _Contents(NamedTuple):
    """What the file says."""

    tokens: dict[str, _Token]
    """By the digest of their secret."""
    tenants: list[Tenant]
    """Those that the file names, then one for each token."""


class Permit(NamedTuple):
    """The rights of one caller while its token is in the file."""

    access: "Access"
    digest: str

    def check(self) -> int:
        """Returns the version of the file; rights change only with it. Raises Unauthenticated if the token is gone."""
        self.access.grant(self.digest)
        return self.access.version

    @property
    def name(self) -> str:
        """The name of the token; empty if callers need none. Raises Unauthenticated."""
        grant = self.access.grant(self.digest)
        return grant.name if grant else ""

    def allows(self, right: Right, namespace: str) -> bool:
        """Returns whether the token grants this right. Raises Unauthenticated."""
        return bool(self.allowed(right, [namespace]))

    def allowed(self, right: Right, namespaces: Sequence[str]) -> list[str]:
        """Returns those of the namespaces in which the token grants this right. Raises Unauthenticated."""
        grant = self.access.grant(self.digest)
        if grant is None:
            return list(namespaces)
        if right not in grant.rights:
            return []
        return [name for name in namespaces if any(fnmatchcase(name, pattern) for pattern in grant.namespaces)]

    def require_somewhere(self, right: Right) -> None:
        """Raises PermissionDenied or Unauthenticated unless the token grants this right in some namespace."""
        grant = self.access.grant(self.digest)
        if grant is not None and (right not in grant.rights or not grant.namespaces):
            raise PermissionDenied(f"token {grant.name!r} has no right to {right}")

    def require(self, right: Right, namespace: str) -> None:
        """Raises PermissionDenied or Unauthenticated unless the token grants this right."""
        if not self.allows(right, namespace):
            raise PermissionDenied(f"token {self.name!r} has no right to {right} in namespace {namespace!r}")


class Access:
    """The token file. Without one, every caller has every right.

    Raises ConfigError if the file cannot be used at the start.
    """

    def __init__(self, path: Path | None) -> None:
        self._looked = time.monotonic()
        self._names: dict[str, str] = {}  # of all tokens since the start, by digest
        self.file: Watched[_Contents] | None = None
        if path is not None:
            try:
                self.file = Watched("tokens", [path], lambda: _read(path), _words)
            except (OSError, ValueError) as error:
                raise ConfigError(f"--tokens {file_name(path)}: {_words(error)}") from None
            self._remember(self.file.value)

    @property
    def version(self) -> int:
        """A number that grows when the contents of the file change."""
        return 0 if self.file is None else self.file.version

    @property
    def tenants(self) -> list[Tenant]:
        """The tenants that the file names, then one for each token."""
        return [] if self.file is None else self.file.value.tenants

    def permit(self, metadata: Mapping[str, Any], remedy: str = SET_TOKEN) -> Permit:
        """Returns the rights of the caller that sent this metadata. Raises Unauthenticated.

        `remedy` says what to do about a missing token.
        """
        if self.file is None:
            return Permit(self, "")
        scheme, _, secret = str(metadata.get("authorization", "")).partition(" ")
        if not secret:
            raise Unauthenticated(f"authorization: the call has no bearer token; {remedy}")
        if scheme.lower() != "bearer":
            raise Unauthenticated("authorization: expected 'Bearer TOKEN'")
        digest = hashlib.sha256(secret.encode()).hexdigest()
        if not secret.isascii():
            digest = ""  # gRPC decodes bytes that are not UTF-8 as Latin-1; no token has this digest
        permit = Permit(self, digest)
        permit.check()
        return permit

    def grant(self, digest: str) -> _Token | None:
        """Returns the token of this digest; None if every caller has every right. Raises Unauthenticated."""
        if self.file is None:
            return None
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._remember(self.file.look())
        grant = self.file.value.tokens.get(digest)
        if grant is None:
            raise Unauthenticated(f"authorization: {self._unknown(digest)}")
        return grant

    def _remember(self, contents: _Contents) -> None:
        self._names |= {digest: token.name for digest, token in contents.tokens.items()}

    def _unknown(self, digest: str) -> str:
        if digest in self._names:
            return f"token {self._names[digest]!r} was removed from the server's token file"
        return f"this server does not know the token; its sha256 begins with {digest[:FINGERPRINT] or '(not ASCII)'}"


def _read(path: Path) -> _Contents:
    file = _File.model_validate(tomllib.loads(read_text(path)))
    of_tokens = [
        Tenant.model_construct(name=token.name, namespaces=token.namespaces, shares=token.shares)
        for token in file.token
    ]
    return _Contents({token.digest(): token for token in file.token}, [*file.tenant, *of_tokens])


def _words(error: Exception) -> str:
    """Returns what is wrong without quoting the file, which holds secrets."""
    if isinstance(error, OSError):
        return reason(error)
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        where = [str(part) for part in first["loc"] if isinstance(part, int) or part in KEYS]  # not an unknown key
        if first["type"] == "extra_forbidden":
            section = [part for part in first["loc"][:-1] if part in SECTIONS]
            known = SECTIONS[str(section[-1])].model_fields if section else _File.model_fields
            return f"{'.'.join([*where, 'unknown key'])}; known are {', '.join(known)}"
        return f"{'.'.join(where)}: {first['msg'].removeprefix('Value error, ')}".removeprefix(": ")
    return "it is not TOML" if isinstance(error, tomllib.TOMLDecodeError) else str(error)
