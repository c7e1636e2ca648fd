"""Answers HTTP requests only under this server's own host names.

Otherwise a web page could read the status page of a server that only its reader's browser reaches: the page's own name
is made to resolve to the server's address (DNS rebinding). The browser then sends that name in the header Host.
"""

import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from aiohttp import web

from histospec.server.settings.config import Config

REFUSAL = (
    "this server does not answer under the host name of this request; use its IP address, or add the name to "
    "--http-hosts\n"
)


class HostNames:
    """The names of a server, in lower case; patterns begin with `*.`. It always has IP addresses and `localhost`."""

    def __init__(self, names: Iterable[str]) -> None:
        names = {name.rstrip(".").lower() for name in names}
        self._names = {name for name in names if "*" not in name} | {"localhost"}
        self._patterns = names - self._names | {"*.localhost"}

    @classmethod
    def of(cls, config: Config) -> "HostNames":
        """Returns the names of the server with this configuration on this machine."""
        addresses = [config.listen, config.http, *(peer.address for peer in config.peers)]
        machine = socket.gethostname()
        return cls([*(address.host for address in addresses), machine, *_full_names(machine), *config.http_hosts])

    def has(self, host: str) -> bool:
        """Returns whether the value of a header Host, `name[:port]`, names this server."""
        name = host.strip().lower()
        if name.startswith("["):
            name = name[1:].partition("]")[0]
        elif name.count(":") == 1:
            name = name.partition(":")[0]
        name = name.rstrip(".")
        return name in self._names or _is_address(name) or any(fnmatchcase(name, one) for one in self._patterns)

    @web.middleware
    async def check(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Answers 421 to a request for another server. A request without Host comes from no browser."""
        hosts = request.headers.getall("Host", [])
        if hosts:
            hosts = [*hosts, request.host]  # differs after `GET http://name/`
        if all(map(self.has, hosts)):
            return await handler(request)
        return web.Response(status=421, text=REFUSAL)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _full_names(machine: str) -> list[str]:
    """Returns the names that /etc/hosts gives this machine, such as that of a pod. DNS might hang."""
    try:
        text = Path("/etc/hosts").read_text("utf-8", "replace")
    except OSError:
        return []
    lines = [line.partition("#")[0].split()[1:] for line in text.splitlines()]
    return [name for names in lines if machine in names for name in names]
