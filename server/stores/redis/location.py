"""Parses URLs of Redis or Valkey. Needs no Redis library, so that a configuration can be checked without it.

    redis://[user:password@]host:port[/database]        one server; rediss:// over TLS
    redis+cluster://[user:password@]host:port,host:port Cluster, found through any node; rediss+cluster:// for TLS

With `?replicas=1`, a write succeeds only once one replica has it, so that it survives the loss of its master.
`?ca=FILE` names the authorities that signed the servers' certificates, if the system does not have them; the file is
reread for each connection.
"""

from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster")


class Location(NamedTuple):
    """A validated URL."""

    nodes: tuple[tuple[str, int], ...]
    cluster: bool
    tls: bool
    ca: str | None
    username: str | None
    password: str | None
    database: int
    replicas: int

    @classmethod
    def parse(cls, url: str) -> "Location":
        """Parses a URL. Raises ValueError with a sentence that contains no part of the URL."""
        try:
            parts = urlsplit(url)
        except ValueError:  # its text quotes the URL
            raise ValueError("the URL cannot be parsed; give redis://HOST:PORT") from None
        if parts.scheme not in SCHEMES:
            raise ValueError(f"a Redis URL must start with one of {', '.join(f'{s}://' for s in SCHEMES)}")
        rest = [parts.path, parts.fragment, *(part for part in parts.query.split("&") if not part.startswith("ca="))]
        if any("@" in part for part in rest):
            raise ValueError("the password has one of / ? # [ ]; write %2F %3F %23 %5B %5D instead")
        who, _, where = parts.netloc.rpartition("@")
        username, _, password = who.partition(":")
        options = parse_qs(parts.query)
        if options.keys() - {"replicas", "ca"}:
            raise ValueError("unknown option after the ?; known are replicas and ca")
        replicas = options.get("replicas", ["0"])[-1]
        database = parts.path.strip("/") or "0"
        cluster = parts.scheme.endswith("+cluster")
        if not replicas.isdecimal():
            raise ValueError("replicas: must be a number")
        if not database.isdecimal() or (cluster and database != "0"):
            raise ValueError(f"database: must be {'0, the only one of a Cluster' if cluster else 'a number'}")
        nodes = tuple(_node(node) for node in where.split(","))
        if not cluster and len(nodes) > 1:
            raise ValueError("several servers need the scheme of a Cluster, redis+cluster://")
        return cls(
            nodes, cluster, parts.scheme.startswith("rediss"), options.get("ca", [None])[-1], unquote(username) or None,
            unquote(password) or None, int(database), int(replicas),
        )  # fmt: skip

    def without_password(self, text: object) -> str:
        """Returns a text without the password: an old server quotes the command that it refuses."""
        return str(text).replace(self.password, "…") if self.password else str(text)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        """Returns the URL without secrets."""
        nodes = ",".join(f"{host}:{port}" for host, port in self.nodes)
        return f"redis{'s' * self.tls}{'+cluster' * self.cluster}://{nodes}/{self.database}"


def _node(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon:
        host, port = text, "6379"
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError("a server is not of the form host:port; give redis://HOST:PORT")
    return host.strip("[]"), int(port)
