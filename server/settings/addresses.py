"""Addresses of sockets and shards."""

import ipaddress
from typing import NamedTuple

from histospec.protocol.names import white_space
from histospec.protocol.redaction import quoted


class Address(NamedTuple):
    """An address that a socket listens on or connects to."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: object) -> "Address":
        """Parses `host:port` or `[v6]:port`. Raises ValueError with a sentence that says what is wrong."""
        if isinstance(text, Address):
            return text
        host, colon, port = str(text).strip().rpartition(":")
        if not colon or not host or set(host) & set("@/?#"):
            raise ValueError(f"must be HOST:PORT, for example 127.0.0.1:6378, is {quoted(text)}")
        if not (port.isascii() and port.isdecimal()) or len(port) > 5 or int(port) > 65535:
            raise ValueError("the port must be a number from 0 to 65535")  # not shown: `u:password` lacks its host
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise ValueError(f"needs brackets around an IPv6 address, for example [::1]:{port}, is {quoted(text)}")
        return cls(host, int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class ShardAddress(NamedTuple):
    """The name of a shard and the address at which clients reach it."""

    name: str
    address: Address

    @classmethod
    def parse(cls, text: object) -> "ShardAddress":
        """Parses `name=host:port`, or `host:port`, which is then also the name."""
        if isinstance(text, ShardAddress):
            return text
        if "@" in str(text):
            raise ValueError(f"must be [NAME=]HOST:PORT, for example a=127.0.0.1:6378, is {quoted(text)}")
        name, _, address = str(text).strip().rpartition("=")
        parsed = Address.parse(address)
        if wrong := white_space(name):
            raise ValueError(f"the shard name {wrong}")
        return cls(name or str(parsed), parsed)
