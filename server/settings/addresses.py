"""Where a socket listens or connects, and where clients reach a shard."""

import ipaddress
from typing import NamedTuple

from histospec.protocol.names import white_space


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


class ShardAddress(NamedTuple):
    """A shard, as clients reach it."""

    name: str
    address: Address

    @classmethod
    def parse(cls, text: object) -> "ShardAddress":
        """Reads `host:port` (its own name) or `name=host:port`."""
        if isinstance(text, ShardAddress):
            return text
        name, _, address = str(text).strip().rpartition("=")
        parsed = Address.parse(address)
        if wrong := white_space(name):
            raise ValueError(f"the shard name {wrong}")
        return cls(name or str(parsed), parsed)
