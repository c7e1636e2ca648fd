"""Diagnosis of an address, with real sockets and real servers."""

import contextlib
import datetime
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme

from histospec.client.config import Tls
from histospec.client.transport.diagnosis import Trouble, diagnose
from tests.support import certificates
from tests.support.ports import free_port
from tests.support.servers import Server, Starter

PATIENCE = 20.0
"""Seconds for servers that answer; only a failing test waits this long."""
SHORT = 0.3
"""Seconds for servers that do not answer."""


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, authority: trustme.CA) -> Path:
    directory = certificates.issue(tmp_path_factory.mktemp("certificates"), authority)
    trustme.CA().cert_pem.write_to_path(directory / "stranger.pem")
    return directory


@pytest.fixture(scope="module")
def encrypted(start_shared: Starter, files: Path) -> Server:
    return start_shared(*certificates.of_server(files))


@pytest.fixture(scope="module")
def mutual(start_shared: Starter, files: Path) -> Server:
    """A server that requires certificates of its clients."""
    return start_shared(*certificates.of_server(files), "--tls-client-ca", str(files / "ca.pem"))


@pytest.fixture
def speaker() -> Iterator[Callable[[bytes], str]]:
    """speaker(words) -> the address of a server that greets each connection so, and hangs up."""
    with contextlib.ExitStack() as stack:

        def listen(words: bytes) -> str:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def serve() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        connection, _ = listener.accept()
                        with connection, contextlib.suppress(OSError):
                            connection.recv(64)
                            connection.sendall(words)

            threading.Thread(target=serve, daemon=True).start()
            stack.callback(listener.shutdown, socket.SHUT_RDWR)
            return f"127.0.0.1:{listener.getsockname()[1]}"

        yield listen


def told(trouble: Trouble | None) -> str:
    """`kind: text; advice`"""
    assert trouble is not None
    return "{}: {}; {}".format(*trouble)


def ca(files: Path, name: str = "ca.pem") -> Tls:
    return Tls(ca=str(files / name))


def test_nothing_is_wrong_with_a_server(shared_server: Server, encrypted: Server, mutual: Server, files: Path) -> None:
    assert diagnose(shared_server.endpoint, None, PATIENCE) is None
    assert diagnose(shared_server.endpoint.replace("127.0.0.1", "localhost"), False, PATIENCE) is None
    assert diagnose(encrypted.endpoint, True, PATIENCE) is None
    assert diagnose(encrypted.endpoint, ca(files), PATIENCE) is None
    whole = Tls(*(str(files / name) for name in ("ca.pem", "client.pem", "client.key")))
    assert diagnose(mutual.endpoint, whole, PATIENCE) is None
    assert diagnose(mutual.endpoint, True, PATIENCE) is None  # whether this client has a certificate is not known


def test_a_name_that_does_not_resolve() -> None:
    text = told(diagnose("no-such-host.invalid:6378", None, PATIENCE))
    assert text.startswith("name: ")
    assert "no-such-host.invalid" in text
    assert "DNS" in text
    assert told(diagnose("a..b:6378", None, PATIENCE)).startswith("name: there is no host named a..b;")


def test_a_port_where_nothing_listens() -> None:
    for host in ("127.0.0.1", "localhost", "[::1]"):
        text = told(diagnose(f"{host}:{free_port()}", None, PATIENCE))
        assert text == "refused: connection refused; is the server running there, and is this its port?"
    assert told(diagnose("localhost:99999", None, PATIENCE)).startswith("port: there is no port 99999;")


def test_a_network_without_a_way() -> None:
    text = told(diagnose("224.0.0.1:6378", None, PATIENCE))  # no TCP to a multicast address
    assert text.startswith("unreachable: network is unreachable; is there a route from this machine's network")


def test_a_machine_that_does_not_answer() -> None:
    """A listener whose queue is full drops what comes, as a firewall does."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(8):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        text = told(diagnose(f"127.0.0.1:{listener.getsockname()[1]}", None, SHORT))
    assert text.startswith("timeout: no answer within 0.3 s; is the machine up, and does a firewall")


@pytest.mark.parametrize("tls", [False, True])
def test_a_server_that_says_nothing(tls: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        text = told(diagnose(f"127.0.0.1:{listener.getsockname()[1]}", tls, SHORT))
    assert text.startswith("silent: it accepts the connection, but says nothing within 0.3 s; is the server stopped")


@pytest.mark.parametrize("tls", [False, True])
def test_the_http_port_of_a_server(shared_server: Server, tls: bool) -> None:
    text = told(diagnose(shared_server.http, tls, PATIENCE))
    assert text.startswith("http: it speaks HTTP/1, not gRPC; is this the server's HTTP port, which is for metrics")
    assert "gRPC port, 6378 unless" in text


def test_plain_text_to_a_server_with_tls(encrypted: Server, mutual: Server) -> None:
    for server in (encrypted, mutual):
        text = told(diagnose(server.endpoint, None, PATIENCE))
        assert text.startswith("wants-tls: it speaks TLS, and this client plain text; set HISTOSPEC_TLS_CA")


@pytest.mark.parametrize("checked", [False, True])
def test_tls_to_a_server_in_plain_text(shared_server: Server, files: Path, checked: bool) -> None:
    text = told(diagnose(shared_server.endpoint, ca(files) if checked else True, PATIENCE))
    assert text.startswith("plain: it speaks plain text, and this client TLS; unset HISTOSPEC_TLS_CA")


def test_a_certificate_of_a_strange_authority(encrypted: Server, files: Path) -> None:
    for tls in (ca(files, "stranger.pem"), Tls()):
        text = told(diagnose(encrypted.endpoint, tls, PATIENCE))
        assert text.startswith("certificate: this client does not accept the server's certificate: ")
        assert "set HISTOSPEC_TLS_CA to the file of the authority" in text


def test_a_certificate_for_another_name(start_server: Starter, tmp_path: Path) -> None:
    authority = trustme.CA()
    certificates.issue(tmp_path, authority)
    other = authority.issue_cert("shards.example")
    (tmp_path / "server.pem").write_bytes(b"".join(blob.bytes() for blob in other.cert_chain_pems))
    other.private_key_pem.write_to_path(tmp_path / "server.key")
    server = start_server(*certificates.of_server(tmp_path))
    text = told(diagnose(server.endpoint, ca(tmp_path), PATIENCE))
    assert "certificate is not valid for '127.0.0.1'" in text
    assert "name the server in HISTOSPEC_ENDPOINT as its certificate does" in text
    assert diagnose(server.endpoint, ca(tmp_path), PATIENCE, certified="shards.example") is None


def test_a_certificate_that_has_expired(start_server: Starter, tmp_path: Path, authority: trustme.CA) -> None:
    certificates.issue(tmp_path, authority)
    past = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=1)
    old = authority.issue_cert("127.0.0.1", not_before=past - datetime.timedelta(days=1), not_after=past)
    (tmp_path / "server.pem").write_bytes(b"".join(blob.bytes() for blob in old.cert_chain_pems))
    old.private_key_pem.write_to_path(tmp_path / "server.key")
    server = start_server(*certificates.of_server(tmp_path))
    text = told(diagnose(server.endpoint, ca(tmp_path), PATIENCE))
    assert "certificate has expired; renew the server's certificate" in text


def test_a_server_that_asks_for_a_certificate(mutual: Server, files: Path) -> None:
    stranger = trustme.CA().issue_cert("worker@example.org")
    stranger.private_key_and_cert_chain_pem.write_to_path(files / "strange.pem")
    strange = str(files / "strange.pem")
    for tls in (ca(files), Tls(str(files / "ca.pem"), strange, strange)):
        text = told(diagnose(mutual.endpoint, tls, PATIENCE))
        assert text.startswith("certificate: it ends the connection after the TLS handshake")
        assert "set HISTOSPEC_TLS_CERT and HISTOSPEC_TLS_KEY" in text


def test_files_that_cannot_be_used(encrypted: Server, files: Path) -> None:
    text = told(diagnose(encrypted.endpoint, Tls(ca="/none.pem"), PATIENCE))
    assert text.startswith("files: the TLS files cannot be used: cannot read /none.pem: No such file or directory; ")
    text = told(diagnose(encrypted.endpoint, ca(files, "server.key"), PATIENCE))
    assert text.startswith("files: the TLS files cannot be used: no certificate or crl found; check the PEM files")
    wrong = Tls(*(str(files / name) for name in ("ca.pem", "client.pem", "server.key")))
    assert "key values mismatch" in told(diagnose(encrypted.endpoint, wrong, PATIENCE))


@pytest.mark.parametrize("tls", [False, True])
def test_something_else(speaker: Callable[[bytes], str], tls: bool) -> None:
    text = told(diagnose(speaker(b"SSH-2.0-OpenSSH_9.2\r\n"), tls, PATIENCE))
    assert text.startswith(r"other: it does not speak HTTP/2; it begins with 'SSH-2.0-OpenSSH_9.2\r\n'; is this the")


@pytest.mark.parametrize("tls", [False, True])
def test_a_proxy_without_a_server(speaker: Callable[[bytes], str], tls: bool) -> None:
    text = told(diagnose(speaker(b""), tls, PATIENCE))
    assert text.startswith("closed: it accepts the connection and closes it at once; is this a proxy")
