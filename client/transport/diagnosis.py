"""Finds out why an address does not answer like a HistoSpec server, with sockets of its own.

gRPC reports all these reasons as UNAVAILABLE. The log and the doctor print what this module finds, in the same words.

For the log, a thread looks for the reason, so the worker never waits; a core asks at most once per minute and shard.
The thread needs neither gRPC nor the loop of the streams. It does not exist in a forked process, in which no client
works. The interpreter does not wait for it at exit.
"""

import errno
import logging
import socket
import ssl
import threading
import time
from typing import NamedTuple

import grpc

from histospec.client.config import USUAL_PORT, Endpoint, Tls
from histospec.client.core.core import Core
from histospec.client.core.outage_log import Outage
from histospec.client.core.shard import Shard

log = logging.getLogger("histospec.client")

PATIENCE = 2.0
"""Seconds for each address."""
BY_THE_SERVER = frozenset(
    (
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.DATA_LOSS,
    )
)
"""Statuses that a HistoSpec server itself returns, so the address is right."""
NOT_THE_ADDRESS = ("wants-tls", "plain", "certificate", "files")
"""Kinds of trouble with the right server at the address."""

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # and an empty SETTINGS frame
_HEADER = 9  # bytes before the content of a frame
_SETTINGS = 4  # type of the first frame that a server sends
_ALERT = 0x15  # first byte of a TLS record


class Trouble(NamedTuple):
    """What is wrong with an address, for a line `ADDRESS: TEXT; ADVICE`."""

    kind: str
    """port, files, name, refused, timeout, unreachable, wants-tls, plain, certificate, http, silent, closed or other"""
    text: str
    advice: str
    """What to check or do."""


def diagnose(address: str, tls: Tls | bool | None, timeout: float, certified: str | None = None) -> Trouble | None:
    """Returns what is wrong with a server's address; None if it speaks HTTP/2, over TLS exactly if the client does.

    Blocks for at most `timeout` seconds. Makes one or two connections and sends no request.

    Args:
        address: `host:port` or `[v6]:port`.
        tls: the authority to check the server's certificate against, and the client's own certificate; True: TLS
            without a check of certificates; False or None: plain text.
        timeout: in seconds.
        certified: the host name in the server's certificate, if it differs from the one in the address.

    """
    host, _, number = address.rpartition(":")
    where = _Where(host.strip("[]"), int(number), time.monotonic() + timeout, timeout)
    if not 0 < where.port < 1 << 16:
        return Trouble("port", f"there is no port {number}", f"the server's is {USUAL_PORT} unless --listen names one")
    try:
        context = _context(tls) if tls else None
    except (OSError, ValueError) as error:  # SSLError is an OSError
        return Trouble(
            "files",
            f"the TLS files cannot be used: {_words(error).removeprefix('tls: ')}",
            "check the PEM files in HISTOSPEC_TLS_CA, HISTOSPEC_TLS_CERT and HISTOSPEC_TLS_KEY",
        )
    try:
        if context is None:
            return _in_plain_text(where)
        return _over_tls(where, context, certified or where.host, isinstance(tls, Tls))
    except _Unreached as error:
        return error.trouble


class _Where(NamedTuple):
    """The address, and the time until which it has to answer."""

    host: str
    port: int
    end: float
    timeout: float

    @property
    def left(self) -> float:
        return max(self.end - time.monotonic(), 0.01)


class _Unreached(Exception):  # noqa: N818 - not an error
    def __init__(self, kind: str, text: str, advice: str) -> None:
        super().__init__(text)
        self.trouble = Trouble(kind, text, advice)


def _in_plain_text(where: _Where) -> Trouble | None:
    heard = _ask(where, where.left)
    if heard is None or (heard and heard[0] != _ALERT):
        return _judge(heard, where.timeout)
    if _takes_hello(where):  # it closed the connection, perhaps because it expected TLS
        return Trouble(
            "wants-tls",
            "it speaks TLS, and this client plain text",
            "set HISTOSPEC_TLS_CA to the file of the authority that signed the server's certificate",
        )
    return _judge(heard, where.timeout)


def _over_tls(where: _Where, context: ssl.SSLContext, name: str, checked: bool) -> Trouble | None:
    heard = None
    try:
        heard = _ask(where, where.left / 2, context, name)
    except ssl.SSLCertVerificationError as error:
        return _bad_certificate(error, name)
    except _HungUp:
        return _NO_CERTIFICATE if checked else None
    except ssl.SSLError:
        pass  # it answers, but not TLS
    if heard:
        return _judge(heard, where.timeout)
    heard = _ask(where, where.left)
    if heard is not None and _is_http2(heard):
        return Trouble(
            "plain",
            "it speaks plain text, and this client TLS",
            "unset HISTOSPEC_TLS_CA and HISTOSPEC_TLS_CERT, or start the server with --tls-cert and --tls-key",
        )
    return _judge(heard, where.timeout)


def _judge(heard: bytes | None, timeout: float) -> Trouble | None:
    """Returns what is wrong, by the first bytes of the answer to HTTP/2's preface.

    `heard` is None if there was no answer, and the connection is still open.
    """
    if heard is None:
        return Trouble(
            "silent",
            f"it accepts the connection, but says nothing within {timeout:g} s",
            "is the server stopped or overloaded, or is this the port of something else?",
        )
    if not heard:
        return Trouble(
            "closed",
            "it accepts the connection and closes it at once",
            "is this a proxy or load balancer whose server is down, or the port of something else?",
        )
    if _is_http2(heard):
        return None
    if heard.startswith(b"HTTP/"):
        return Trouble(
            "http",
            "it speaks HTTP/1, not gRPC",
            "is this the server's HTTP port, which is for metrics and the status page? "
            f"Drafts come from its gRPC port, {USUAL_PORT} unless --listen names another",
        )
    start = heard[:32].decode("ascii", "replace")
    return Trouble(
        "other", f"it does not speak HTTP/2; it begins with {start!r}", "is this the port of something else?"
    )


def _is_http2(heard: bytes) -> bool:
    return len(heard) >= _HEADER and heard[3] == _SETTINGS and heard[5:_HEADER] == bytes(4)


class _HungUp(Exception):  # noqa: N818 - not an error
    """The server accepted the TLS handshake and then closed the connection: it rejects the client's certificate."""


def _ask(
    where: _Where, patience: float, context: ssl.SSLContext | None = None, name: str | None = None
) -> bytes | None:
    """Returns the first bytes of the answer to HTTP/2's preface; b"" if the server hung up, None if it sent nothing.

    Raises SSLError, _HungUp, _Unreached.
    """
    until = time.monotonic() + patience
    with _connect(where) as connection:
        connection.settimeout(max(until - time.monotonic(), 0.01))
        spoken = None
        heard = b""
        try:
            spoken = connection if context is None else context.wrap_socket(connection, server_hostname=name)
            with spoken:
                spoken.sendall(_PREFACE)
                while len(heard) < _HEADER and (more := spoken.recv(64)):
                    heard += more
        except TimeoutError:
            return heard or None
        except OSError as error:
            if isinstance(error, ssl.SSLError) and spoken is None:
                raise
        if context is not None and spoken is not None and not heard:
            raise _HungUp
        return heard


def _takes_hello(where: _Where) -> bool:
    """Returns whether the server answers TLS."""
    with _connect(where) as connection:
        connection.settimeout(where.left)
        try:
            with _context(True).wrap_socket(connection, server_hostname=where.host):
                return True
        except ssl.SSLError as error:
            return "ALERT" in (error.reason or "")
        except OSError:
            return False


def _connect(where: _Where) -> socket.socket:
    """Returns a connection to the first address that accepts one. Raises _Unreached."""
    troubles = []
    for family, kind, protocol, _, address in _look_up(where):
        connection = socket.socket(family, kind, protocol)
        connection.settimeout(where.left)
        try:
            connection.connect(address)
        except OSError as error:
            connection.close()
            troubles.append(_unreached(error, where.timeout))
        else:
            return connection
    raise min(troubles, key=lambda t: _TELLING.index(t.trouble.kind))


_TELLING = ["refused", "timeout", "unreachable"]
"""Kinds of trouble, the most informative first: the order of preference if a name has several addresses."""


def _unreached(error: OSError, timeout: float) -> _Unreached:
    if isinstance(error, ConnectionRefusedError):
        return _Unreached("refused", "connection refused", "is the server running there, and is this its port?")
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return _Unreached(
            "timeout",
            f"no answer within {timeout:g} s",
            "is the machine up, and does a firewall or network policy let packets through?",
        )
    return _Unreached("unreachable", _words(error), "is there a route from this machine's network to the server's?")


Found = list[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int] | tuple[str, int, int, int]]]


def _look_up(where: _Where) -> Found:
    """Returns the addresses of a name. Raises _Unreached.

    Runs in a thread: the system's resolver has no deadline.
    """
    found: Found = []
    problem: list[OSError | UnicodeError] = []

    def ask() -> None:
        try:
            found.extend(socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM))  # type: ignore[arg-type]
        except (OSError, UnicodeError) as error:  # UnicodeError: a label that is empty or too long
            problem.append(error)

    thread = threading.Thread(target=ask, name="histospec-resolve", daemon=True)
    thread.start()
    thread.join(where.left)
    if found:
        return found
    error = problem[0] if problem else None
    if error is None or (isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN):
        raise _Unreached(
            "name",
            f"the name {where.host} could not be looked up: the name server does not answer",
            "is the name right, and does DNS work on this machine?",
        )
    raise _Unreached(
        "name",
        f"there is no host named {where.host}",
        "is it spelled right, and known to this machine's DNS or /etc/hosts?",
    )


def _context(tls: Tls | bool) -> ssl.SSLContext:
    """Returns the client's TLS context. Raises ConfigurationError or SSLError if a file is unreadable or invalid."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    if isinstance(tls, bool):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    tls.credentials()  # raises clearer errors about missing files
    if tls.ca is None:
        context.load_default_certs()
    else:
        context.load_verify_locations(tls.ca)
    if tls.certificate is not None:
        context.load_cert_chain(tls.certificate, tls.key)
    return context


_NAME, _ADDRESS = 62, 64  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
_EARLY, _EXPIRED = 9, 10


def _bad_certificate(error: ssl.SSLCertVerificationError, name: str) -> Trouble:
    advice = "set HISTOSPEC_TLS_CA to the file of the authority that signed the server's certificate"
    if error.verify_code in (_NAME, _ADDRESS):
        advice = f"name the server in HISTOSPEC_ENDPOINT as its certificate does, or have one made for {name}"
    elif error.verify_code in (_EARLY, _EXPIRED):
        advice = "renew the server's certificate, or set the clock of this machine"
    reason = error.verify_message.rstrip(".")
    return Trouble("certificate", f"this client does not accept the server's certificate: {reason}", advice)


_NO_CERTIFICATE = Trouble(
    "certificate",
    "it ends the connection after the TLS handshake, as servers do that require a client certificate",
    "set HISTOSPEC_TLS_CERT and HISTOSPEC_TLS_KEY to a certificate of an authority in the server's --tls-client-ca",
)


def _words(error: Exception) -> str:
    """Returns the reason alone."""
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).replace("_", " ").lower()
    return error.strerror.lower() if isinstance(error, OSError) and error.strerror else str(error)


# ---- for the log --------------------------------------------------------------------------------------------------


def explain(core: Core, shard: Shard) -> None:
    """Starts to find out why the shard does not answer, and then has the core log it. Never waits."""
    if shard.contact.code in BY_THE_SERVER:
        core.log_outage(shard)
        return
    try:
        threading.Thread(target=_explain_now, args=(core, shard), name="histospec-diagnosis", daemon=True).start()
    except RuntimeError:  # the interpreter ends, or there may be no more threads
        core.log_outage(shard)


def _explain_now(core: Core, shard: Shard) -> None:
    outage = None
    try:
        found = shard.endpoint.address != ""
        asked = (shard.endpoint,) if found else core.config.endpoints  # the addresses behind which shards were expected
        outages = [_outage(core, endpoint) for endpoint in asked]
        if all(outages):
            outage = outages[0]
    except Exception:
        log.debug("HistoSpec: why %s does not answer could not be found out", shard.name, exc_info=True)
    core.log_outage(shard, outage)


def _outage(core: Core, endpoint: Endpoint) -> Outage | None:
    trouble = diagnose(endpoint.address, core.config.tls, PATIENCE, endpoint.certified)
    if trouble is None:
        return None
    where = endpoint.address if endpoint.name == endpoint.address else f"{endpoint.address}, shard {endpoint.name}"
    advice = trouble.advice
    if trouble.kind not in NOT_THE_ADDRESS:
        advice = f"is HISTOSPEC_ENDPOINT right? {advice[:1].upper()}{advice[1:]}"
    return Outage(f"no server at {where} ({trouble.text})", advice)
