"""The server's certificates, read again when their files change."""

from pathlib import Path

import grpc
import structlog
from cryptography import x509

from histospec.server.errors import ConfigError
from histospec.server.small_files import read_bytes
from histospec.server.watched import Watched

log = structlog.get_logger()


class Certificates:
    """PEM files: a certificate chain, its key and, for mTLS, the authorities that sign clients' certificates.

    Raises ConfigError where they cannot be used at the start. Later, files that cannot be read leave in force what was
    there.
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None) -> None:
        self._files = {"--tls-cert": certificate, "--tls-key": key}
        if client_ca is not None:
            self._files["--tls-client-ca"] = client_ca
        self._watched = Watched(self._files.values())
        self._first = self._read()
        self._chain = Watched([certificate])  # each of the two notices a change once, for itself
        self._expiry = _expiry(certificate)
        self._watched.changed()  # the first handshake need not read them again

    def credentials(self) -> grpc.ServerCredentials:
        """For a port. Every handshake looks whether the files have changed; connections that are open stay."""
        asks = "--tls-client-ca" in self._files
        return grpc.dynamic_ssl_server_credentials(self._first, self._fetch, require_client_authentication=asks)  # type: ignore[arg-type]  # None: as before

    def expiry(self) -> float:
        """When the first certificate of the chain expires, in seconds since 1970, as the file is now."""
        try:
            if self._chain.changed():
                self._expiry = _expiry(self._files["--tls-cert"])
        except (ConfigError, OSError) as error:
            log.error("the certificate cannot be read", reason=str(error))
        return self._expiry

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        try:
            if not self._watched.changed():
                return None
            fresh = self._read()
        except (ConfigError, OSError) as error:
            log.error("certificates cannot be read; the old ones stay", reason=str(error))
            return None
        log.info("certificates read again", files=[str(path) for path in self._files.values()])
        return fresh

    def _read(self) -> grpc.ServerCertificateConfiguration:
        contents = []
        for flag, path in self._files.items():
            try:
                text = read_bytes(path)
            except OSError as error:
                raise ConfigError(f"{flag} {path}: {(error.strerror or str(error)).lower()}") from None
            if b"-----BEGIN" not in text:
                raise ConfigError(f"{flag} {path}: is not a PEM file")
            contents.append(text)
        certificate, key, *authorities = contents
        return grpc.ssl_server_certificate_configuration(
            [(key, certificate)], root_certificates=authorities[0] if authorities else None
        )


def _expiry(path: Path) -> float:
    """Raises ConfigError where the file holds no certificates, OSError where it cannot be read."""
    try:
        chain = x509.load_pem_x509_certificates(read_bytes(path))
    except ValueError as error:
        raise ConfigError(f"--tls-cert {path}: {error}") from None
    return min(certificate.not_valid_after_utc for certificate in chain).timestamp()
