"""The server's certificates, reread when their files change."""

from pathlib import Path
from typing import NamedTuple

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from histospec.protocol.redaction import file_name
from histospec.server.errors import ConfigError, reason
from histospec.server.security.watched_files import Watched, read_bytes


class _Contents(NamedTuple):
    """The contents of the files, read together."""

    certificate: bytes
    key: bytes
    authorities: bytes | None
    expiry: float
    """Expiry of the first certificate of the chain to expire, in seconds since 1970."""


class Certificates:
    """PEM files: a certificate chain, its key and, for mTLS, the authorities that sign clients' certificates.

    Raises ConfigError if the files cannot be used at the start. If they cannot be used later, the previous contents
    stay in force.
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None) -> None:
        self._paths = {"--tls-cert": certificate, "--tls-key": key}
        if client_ca is not None:
            self._paths["--tls-client-ca"] = client_ca
        self.files = Watched("certificates", self._paths.values(), self._read)
        self._given = self.files.value

    def credentials(self) -> grpc.ServerCredentials:
        """Returns credentials for a port. Every handshake checks the files for changes; open connections stay."""
        asks = "--tls-client-ca" in self._paths
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._given),
            self._fetch,  # type: ignore[arg-type]  # None: unchanged
            require_client_authentication=asks,
        )

    def expiry(self) -> float:
        """Returns the time at which the first certificate of the chain expires, in seconds since 1970."""
        return self.files.look().expiry

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        contents = self.files.look()
        if contents == self._given:
            return None
        self._given = contents
        return _configuration(contents)

    def _read(self) -> _Contents:
        texts = {flag: _text(flag, path) for flag, path in self._paths.items()}
        where = self._paths["--tls-cert"], self._paths["--tls-key"]
        expiry = _checked(texts["--tls-cert"], texts["--tls-key"], *where)
        return _Contents(texts["--tls-cert"], texts["--tls-key"], texts.get("--tls-client-ca"), expiry)


def _text(flag: str, path: Path) -> bytes:
    try:
        text = read_bytes(path)
    except OSError as error:
        raise ConfigError(f"{flag} {file_name(path)}: {reason(error)}") from None
    if b"-----BEGIN" not in text:
        raise ConfigError(f"{flag} {file_name(path)}: is not a PEM file")
    return text


def _checked(certificate: bytes, key: bytes, chain_path: Path, key_path: Path) -> float:
    """Returns when the chain expires. Raises ConfigError if a file is no PEM, or the key and certificate differ."""
    try:
        chain = x509.load_pem_x509_certificates(certificate)
    except ValueError as error:
        raise ConfigError(f"--tls-cert {chain_path}: {error}") from None
    try:
        own = load_pem_private_key(key, None).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"--tls-key {file_name(key_path)}: {error}") from None
    if own != chain[0].public_key():
        raise ConfigError(
            f"--tls-key {file_name(key_path)}: is not the key of the certificate in {chain_path}; give both of one pair"
        )
    return min(certificate.not_valid_after_utc for certificate in chain).timestamp()


def _configuration(contents: _Contents) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(contents.key, contents.certificate)], root_certificates=contents.authorities
    )
