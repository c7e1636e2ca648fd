"""Certificates of a test: an authority, a server on loopback or of other names, and a client."""

from collections.abc import Sequence
from pathlib import Path

import trustme


def issue(directory: Path, authority: trustme.CA, names: Sequence[str] = ("127.0.0.1", "localhost")) -> Path:
    """Writes ca.pem, server.pem, server.key, client.pem and client.key. Returns the directory."""
    own, visitor = authority.issue_cert(*names), authority.issue_cert("worker@example.org")
    authority.cert_pem.write_to_path(directory / "ca.pem")
    for name, certificate in (("server", own), ("client", visitor)):
        certificate.private_key_pem.write_to_path(directory / f"{name}.key")
        chain = b"".join(blob.bytes() for blob in certificate.cert_chain_pems)
        (directory / f"{name}.pem").write_bytes(chain)
    return directory


def of_server(files: Path) -> tuple[str, ...]:
    """The options of a server that shows its certificate."""
    return "--tls-cert", str(files / "server.pem"), "--tls-key", str(files / "server.key")
