"""The HTTP port answers only under the server's own host names, so that a web page cannot read it (DNS rebinding)."""

import http.client
import socket
from collections.abc import Callable

import pytest

from histospec.server.observability.host_names import HostNames
from histospec.server.settings.config import Config
from tests.support.redis_processes import RedisProcess
from tests.support.servers import Server, Starter
from tests.support.waiting import eventually

PAGES = ("/", "/status", "/metrics", "/healthz", "/readyz", "/livez", "/page.js", "/absent")


def ask(server: Server, path: str, *hosts: str) -> tuple[int, str]:
    """Requests a page with these headers Host."""
    name, port = server.http.rsplit(":", 1)
    connection = http.client.HTTPConnection(name, int(port), timeout=60)
    try:
        connection.putrequest("GET", path, skip_host=True)
        for host in hosts:
            connection.putheader("Host", host)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize("path", PAGES)
def test_another_host_name_is_refused(shared_server: Server, path: str) -> None:
    for host in ("rebind.example", "rebind.example:9464", "127.0.0.1.rebind.example", "localhost.rebind.example", ""):
        status, text = ask(shared_server, path, host)
        assert status in (400, 421), host
        assert "rebind" not in text
    assert "--http-hosts" in ask(shared_server, path, "rebind.example")[1]
    assert ask(shared_server, path, "localhost", "rebind.example")[0] in (400, 421)


def test_its_own_names_are_answered(start_server: Starter) -> None:
    flags = ("--peers", "a=shard-0.drafts.rl.svc:6378", "--http-hosts", "Drafts.example.org,*.rl.svc")
    server = start_server(*flags)
    port = server.http.rsplit(":", 1)[1]
    for host in (
        server.http, "127.0.0.1", "[::1]:9464", "10.0.3.1:9464", f"localhost:{port}", "LOCALHOST.", "a.localhost",
        socket.gethostname(), "shard-0.drafts.rl.svc:9464", "drafts.example.org", "histospec.rl.svc:9464",
    ):  # fmt: skip
        assert ask(server, "/livez", host)[0] == 200, host
    assert ask(server, "http://drafts.example.org/livez", "drafts.example.org")[0] == 200
    assert ask(server, "http://rebind.example/livez", "localhost")[0] == 421
    for host in ("example.org", "rl.svc", "drafts.example.org.rebind.example"):
        assert ask(server, "/livez", host)[0] == 421, host


def test_a_probe_without_a_host_is_answered(shared_server: Server) -> None:
    name, port = shared_server.http.rsplit(":", 1)
    with socket.create_connection((name, int(port)), timeout=60) as peer:
        peer.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
        assert peer.makefile("rb").readline().split()[1] == b"200"


def test_listening_on_a_name_includes_that_name() -> None:
    names = HostNames.of(Config(http="metrics.internal:9464", listen="grpc.internal:6378", insecure=True))
    assert names.has("metrics.internal:9464")
    assert names.has("grpc.internal")
    assert not names.has("internal")


def test_healthz_says_that_the_store_does_not_answer(
    start_server: Starter, start_redis: Callable[..., RedisProcess]
) -> None:
    """An idle server notices an outage, says so, stays alive and ready, and says when the store is back."""
    redis = start_redis()
    server = start_server("--store", f"redis://{redis.where}")
    assert '"store": "ok"' in server.get("/healthz")[1]
    redis.client.config_set("save", "")
    redis.kill()
    eventually(lambda: "Redis does not answer" in server.get("/healthz")[1])
    status, text = server.get("/healthz")
    assert status == 200
    assert '"ready": true' in text
    assert (server.get("/livez")[0], server.get("/readyz")[0]) == (200, 200)
    assert "The store does not answer" in server.get("/status")[1]
    redis.start()
    eventually(lambda: '"store": "ok"' in server.get("/healthz")[1])
