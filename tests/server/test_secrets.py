"""A secret in the wrong option, or in a wrong value, is in no message, log line or page."""

import io
import json
import re
import socket
import struct
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from histospec.client.config import configure
from histospec.client.errors import ConfigurationError
from histospec.protocol.redaction import file_name, quoted, redacted, without_secrets
from histospec.server.errors import ConfigError
from histospec.server.logs import lines as logs
from histospec.server.settings.config import PREFIX, Config
from histospec.server.settings.options import load
from tests.support.children import histospec
from tests.support.servers import Server, Starter
from tests.support.waiting import eventually

CANARY = "hunter2SECRET"
VALUES = (
    f"redis://u:{CANARY}@h:1/0?replicas={CANARY}",
    f"redis:/u:{CANARY}@h:1",
    f"otlp://u:{CANARY}@h:1",
    f"u:{CANARY}@h:1",
    f"a=u:{CANARY}@h:1,{CANARY}@i:2",
    f"redis://u:a b{CANARY}@h:1",
    f"redis://u:{CANARY}/@h:1",
    f"redis://u:{CANARY}" + "x" * 400 + "@h:1",
)
URLS = (*VALUES, f"redis://u:{CANARY}", f"redis://h:1?{CANARY}=1", f"redis://h:1/{CANARY}", CANARY)
Give = Callable[[str, str, Path, pytest.MonkeyPatch], list[str]]


def _flag(name: str, value: str, folder: Path, environment: pytest.MonkeyPatch) -> list[str]:
    return [f"--{name}", value]


def _variable(name: str, value: str, folder: Path, environment: pytest.MonkeyPatch) -> list[str]:
    environment.setenv(PREFIX + name.replace("-", "_").upper(), value)
    return []


def _in_file(form: str) -> Give:
    def give(name: str, value: str, folder: Path, environment: pytest.MonkeyPatch) -> list[str]:
        file = folder / "c.toml"
        file.write_text(form.format(name=name, value=json.dumps(value)))
        return ["--config", str(file)]

    return give


SOURCES: dict[str, Give] = {
    "flag": _flag,
    "variable": _variable,
    "file": _in_file("{name} = {value}"),
    "list in a file": _in_file("{name} = [{value}]"),
    "table in a file": _in_file("[{name}]\nurl = {value}"),
    "unknown key": _in_file("{name}x = {value}"),
    "value as a key": _in_file("{value} = 1"),
    "key twice": _in_file("{value} = 1\n{value} = 1"),
    "no TOML": _in_file("{name} = {value}{value}"),
    "unknown flag": lambda name, value, *_: [f"--{name}x", value],
    "unknown flag with =": lambda name, value, *_: [f"--{name}x={value}"],
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("option", [name.replace("_", "-") for name in Config.model_fields])
def test_no_option_from_no_source_is_shown(
    option: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for value in URLS if option == "store" else VALUES:
        said = outcome(SOURCES[source](option, value, tmp_path, monkeypatch))
        assert CANARY not in said, value
        assert f"--{option}" in said or option in ("store", "insecure") or source not in ("flag", "variable")


def outcome(words: list[str]) -> str:
    """Returns the error of a configuration, or the configuration as a log would show it."""
    try:
        return repr(load(words))
    except ConfigError as error:
        return str(error)


def test_what_no_option_expects_is_not_shown_either() -> None:
    url = VALUES[0]
    for words in (
        [url],
        ["serve", url],
        ["serve", "--config", url],
        ["serve", f"--insecure={url}"],
        ["status", url],
        ["status", f"grpc://u:{CANARY}@h:1"],
        ["status", "127.0.0.1:1", "--http", f"u:{CANARY}@h:1"],
        ["status", "127.0.0.1:1", "--token-file", CANARY],
        ["status", "127.0.0.1:1", "--timeout", url],
        ["doctor", "--endpoint", url, "--namespace", "run"],
        ["doctor", "--endpoint", "h:1", "--namespace", "run", "--tls-ca", CANARY],
        ["snapshot", f"s3://u:{CANARY}@bucket/x", "--from", "127.0.0.1:1"],
        ["snapshot", "a.jsonl", "--from", url],
        ["snapshot", "a.jsonl", "--store", f"redis://u:{CANARY}"],
        ["restore", f"s3://u:{CANARY}@bucket/x.jsonl", "--to", "127.0.0.1:1"],
        ["restore", url, "--to", url],
        ["forget", "--older-than", url],
        ["bench", f"grpc://u:{CANARY}@h:1"],
        ["replay", url],
    ):
        code, said = histospec(*words).end()
        assert code in (1, 2), words
        assert CANARY not in said, words
        assert "Traceback" not in said, words


@pytest.mark.parametrize(
    "content",
    [
        f'[[token]]\nname = "a"\nsecret = "{CANARY[:8]}"\n',
        f'[[token]]\nname = "a"\nsecret = {CANARY}\n',
        f'[[token]]\nname = "a"\nsecret = "{CANARY}-0123456789"\nrights = ["{CANARY}"]\n',
        f'[[token]]\nname = "a"\nsecret = "{CANARY}-0123456789\u00e9"\n',
        f'[[token]]\nname = "a"\nsecre = "{CANARY}-0123456789"\n',
        f'[[token]]\nname = "a"\nsecret = "{CANARY}-0123456789"\n"{CANARY}" = "a"\n',
        f'["{CANARY}"]\n["{CANARY}"]\n',
        f'["{CANARY}"]\na = 1\n',
        f'[[token]]\nname = "a"\nsha256 = "{CANARY}"\n',
        f'[[token]]\nname = "a"\nsecret = ["{CANARY}"]\n',
        f'token = "{CANARY}"\n',
        CANARY,
    ],
)
def test_a_token_file_is_not_quoted(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokens.toml").write_text(content)
    words = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--tokens", "tokens.toml")
    code, said = histospec("serve", *words, cwd=tmp_path).end()
    assert code == 2
    assert said.startswith("histospec serve: --tokens tokens.toml: ")
    assert CANARY[:8] not in said


def test_a_secret_given_as_the_name_of_its_file_is_not_shown(tmp_path: Path) -> None:
    for option in ("--tokens", "--store-file"):
        words = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", option, CANARY)
        code, said = histospec("serve", *words, cwd=tmp_path).end()
        assert (code, CANARY in said) == (2, False)
        assert f"{option} the given file: no such file" in said


def test_the_client_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for endpoint in (*VALUES, f"grpc://u:{CANARY}@h:1", f"discover://u:{CANARY}@h:1", f"{CANARY}@h:1"):
        with pytest.raises(ConfigurationError) as caught:
            configure(endpoint, "run")
        assert CANARY not in str(caught.value)
    monkeypatch.setenv("HISTOSPEC_TOKEN", f"{CANARY}\u00e9")
    with pytest.raises(ConfigurationError, match="HISTOSPEC_TOKEN: character 14 is not printable ASCII") as caught:
        configure("h:1", "run")
    assert CANARY not in str(caught.value)


def test_how_values_are_shown() -> None:
    assert redacted("redis://u:pass@h:1/0?replicas=1") == "redis://…@h:1/0?…"
    assert redacted("127.0.0.1:6378,b:6378") == "127.0.0.1:6378,b:6378"
    assert quoted("lots") == "'lots'"
    assert quoted(["a"]) == "a list"
    assert file_name("/etc/none") == "/etc/none"
    assert file_name(CANARY) == "the given file"
    assert without_secrets("see redis:/u:p/q@h:1 and http://h/x?token=abc, Bearer abc") == (
        "see redis:/…@h:1 and http://h/x?…, Bearer …"
    )


WORDS = st.lists(
    st.sampled_from([":", "/", "//", "://", "@", "?", "a", " ", ",", "'", ")", "token=", "bearer "]), max_size=14
)
NAIVE = (
    (re.compile(r"(:/{1,2})\S*@"), r"\1…@"),
    (re.compile(r"(:/{1,2}[^\s?]*)\?[^\s'\",;)]+"), r"\1?…"),
    (re.compile(r"(?i)(?<!\.)\b(bearer\s+|(?:password|secret|token)\s*[=:]\s*)[^\s,;]+"), r"\1…"),
)
"""They take the square of a text's length."""


@given(WORDS)
def test_texts_are_cleaned_as_by_slow_expressions(words: list[str]) -> None:
    expected = "".join(words)
    for expression, shown in NAIVE:
        expected = expression.sub(shown, expected)
    assert without_secrets("".join(words)) == expected


@pytest.mark.parametrize("word", ["://", "://?", "://@", ":/?,", "token ", "bearer ", "token: "])
def test_a_megabyte_is_cleaned_without_looking_at_it_again_and_again(word: str) -> None:
    """By the expressions above, it would take hours."""
    assert without_secrets(word * ((1 << 20) // len(word)))


def test_a_traceback_in_the_log_has_no_secrets() -> None:
    file = io.StringIO()
    configured = structlog.get_config()
    try:
        logs.configure("json", "info", file)
        password = CANARY
        try:
            raise ValueError(f"redis://u:{password}@h:1 does not answer")
        except ValueError:
            structlog.get_logger().exception("failed", url=f"redis://u:{password}@h:1", peers=[f"http://{password}@h"])
    finally:
        structlog.configure(**configured)
    assert "ValueError" in file.getvalue()
    assert CANARY not in file.getvalue()


# Metadata that no client library sends


def _text(value: bytes) -> bytes:
    """Encodes a literal of HPACK, RFC 7541, 5.2."""
    if len(value) < 127:
        return bytes([len(value)]) + value
    rest, out = len(value) - 127, bytearray([127])
    while rest >= 128:
        out.append(rest & 127 | 128)
        rest >>= 7
    return bytes(out) + bytes([rest]) + value


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def call(endpoint: str, method: str, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Makes a call with an empty message. Returns the answer, or what came until the server closed the connection."""
    host, port = endpoint.rsplit(":", 1)
    pairs = [
        (b":method", b"POST"), (b":scheme", b"http"), (b":path", method.encode()), (b":authority", b"x"),
        (b"content-type", b"application/grpc"), (b"te", b"trailers"), *headers,
    ]  # fmt: skip
    block = b"".join(b"\0" + _text(name) + _text(value) for name, value in pairs)
    with socket.create_connection((host, int(port)), timeout=60) as peer:
        peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0))
        peer.sendall(_frame(1, 4, 1, block) + _frame(0, 1, 1, b"\0\0\0\0\0"))
        seen = b""
        while data := peer.recv(1 << 16):
            seen += data
            if b"grpc-status" in seen:
                break
    return seen


HEADERS: dict[str, tuple[bytes, bytes]] = {
    "Latin-1": (b"authorization", f"Bearer {CANARY}é".encode("latin-1")),
    "cut UTF-8": (b"authorization", f"Bearer {CANARY}é".encode()[:-1]),
    "UTF-8": (b"authorization", f"Bearer {CANARY}é".encode()),
    "another scheme": (b"authorization", f"Basic {CANARY}".encode()),
    "no scheme": (b"authorization", CANARY.encode()),
    "unknown": (b"authorization", f"Bearer {CANARY}-x".encode()),
    "another key": (b"x-token", f"{CANARY}\xff".encode("latin-1")),
    "control character": (b"authorization", f"Bearer {CANARY}\x01".encode()),
    "line break": (b"authorization", f"Bearer {CANARY}\r\n".encode()),
    "NUL": (b"authorization", f"Bearer {CANARY}\0".encode()),
    "upper case": (b"Authorization", f"Bearer {CANARY}".encode()),
    "binary": (b"authorization-bin", f"{CANARY}!!".encode()),
    "a secret as a key": (CANARY.encode(), b"x"),
    "long": (b"authorization", f"Bearer {CANARY * 1000}".encode()),
    "timeout": (b"grpc-timeout", CANARY.encode()),
    "encoding": (b"grpc-encoding", CANARY.encode()),
}
METHODS = ("/histospec.v1.DraftService/History", "/histospec.v1.DraftService/Draft", "/grpc.health.v1.Health/Check")


@pytest.fixture
def guarded(start_server: Starter, tmp_path: Path) -> Server:
    """Returns a server whose tokens no header above has, although the hash of one is that of the Latin-1 text."""
    latin = sha256(f"{CANARY}é".encode()).hexdigest()
    (tmp_path / "tokens.toml").write_text(f'[[token]]\nname = "a"\nsha256 = "{latin}"\n')
    return start_server("--tokens", str(tmp_path / "tokens.toml"), "--log-level", "debug")


def test_a_token_of_any_bytes_is_refused_and_not_shown(guarded: Server) -> None:
    for name, header in HEADERS.items():
        for method in METHODS:
            answer = call(guarded.endpoint, method, [header])
            if header[0] == b"authorization" and "DraftService" in method and "grpc-status" in str(answer):
                assert CANARY.encode() not in answer, name
                assert b"grpc-status\x0216" in answer, name  # UNAUTHENTICATED
    assert "UNAUTHENTICATED" in {line["code"] for line in guarded.logged("rpc refused")}
    eventually(lambda: guarded.get("/status")[0] == 200)
    pages = "".join(guarded.get(page)[1] for page in ("/healthz", "/readyz", "/status", "/metrics"))
    assert CANARY not in json.dumps(guarded.log) + pages
