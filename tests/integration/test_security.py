"""Access control with real TLS and certificates, and with tokens that are absent, wrong, or lack a right."""

import datetime
import hashlib
import json
import os
import queue
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from cryptography import x509

from histospec.client import DraftClient, Response
from histospec.client.config import Tls
from histospec.client.errors import HistoSpecError
from histospec.v1 import draft_pb2 as pb
from tests.support import certificates
from tests.support.children import histospec
from tests.support.servers import Server, Starter
from tests.support.waiting import eventually
from tests.support.wires import Connector

SECRETS = {name: f"{name}-secret-0123456789" for name in ("trainer", "reader", "operator", "revoked")}
TOKENS = f"""
[[token]]
name = "trainer"
sha256 = "{hashlib.sha256(SECRETS["trainer"].encode()).hexdigest()}"
namespaces = ["run-*"]

[[token]]
name = "reader"
secret = "{SECRETS["reader"]}"
namespaces = ["run-1"]
rights = ["read"]

[[token]]
name = "operator"
secret = "{SECRETS["operator"]}"
rights = ["read", "write", "admin"]
"""
REVOKED = f"""
[[token]]
name = "revoked"
secret = "{SECRETS["revoked"]}"
"""
TEXT = list(range(100, 130))


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(tmp_path: Path, authority: trustme.CA) -> Path:
    certificates.issue(tmp_path, authority)
    (tmp_path / "tokens.toml").write_text(TOKENS + REVOKED)
    return tmp_path


@pytest.fixture
def guarded(start_server: Starter, files: Path) -> Server:
    """Returns a server with TLS that asks for tokens."""
    return start_server(*certificates.of_server(files), "--tokens", str(files / "tokens.toml"))


@pytest.fixture
def visit(guarded: Server, files: Path) -> Iterator[Callable[..., DraftClient]]:
    """visit(token name, namespace) returns a DraftClient."""
    clients = []

    def connect(who: str | None, namespace: str = "run-1") -> DraftClient:
        token = SECRETS.get(who, who) if who else None
        tls = Tls(ca=str(files / "ca.pem"))
        clients.append(DraftClient(guarded.endpoint, namespace=namespace, token=token, tls=tls, deadline=5.0))
        return clients[-1]

    yield connect
    for client in clients:
        client.shutdown()


def refused(call: Callable[[], object], code: str) -> str:
    with pytest.raises(HistoSpecError) as caught:
        call()
    cause = caught.value.__cause__
    assert isinstance(cause, grpc.RpcError)
    assert cause.code().name == code, repr(caught.value)
    return str(caught.value)


def drafted(client: DraftClient) -> int:
    (session,) = client.open([[1, 2]])
    (draft,) = client.step([session], [TEXT[:5]])
    client.close([session], commit=False)
    return len(draft)


def test_who_shows_a_good_token_is_served(visit: Callable[..., DraftClient]) -> None:
    trainer = visit("trainer")
    trainer.ingest([1, 2], [Response(TEXT)], epoch=0)
    assert drafted(trainer)
    assert drafted(visit("reader"))
    assert len(visit("operator").history([1, 2])) == 1


@pytest.mark.parametrize("token", [None, "no-such-token-0123456789", "trainer-secret-012345678"])
def test_without_a_known_token_nothing_is_done(
    guarded: Server, visit: Callable[..., DraftClient], token: str | None
) -> None:
    visit("trainer").ingest([1, 2], [Response(TEXT)], epoch=0)
    stranger = visit(token)
    refused(lambda: stranger.ingest([1, 2], [Response([9])], epoch=0), "UNAUTHENTICATED")
    refused(lambda: stranger.history([1, 2]), "UNAUTHENTICATED")
    refused(lambda: stranger.predict_length([1, 2]), "UNAUTHENTICATED")
    refused(stranger.topology, "UNAUTHENTICATED")
    refused(stranger.drop_namespace, "UNAUTHENTICATED")
    assert drafted(stranger) == 0
    assert len(visit("trainer").history([1, 2])) == 1
    assert guarded.metrics()['histospec_rpc_errors_total{code="UNAUTHENTICATED",method="Ingest"}'] == 1


def test_a_token_is_good_for_its_namespaces_alone(visit: Callable[..., DraftClient]) -> None:
    visit("operator", "other").ingest([1, 2], [Response(TEXT)], epoch=0)
    trainer = visit("trainer", "other")
    message = refused(lambda: trainer.ingest([1, 2], [Response([9])]), "PERMISSION_DENIED")
    assert "token 'trainer' has no right to write in namespace 'other'" in message
    refused(lambda: trainer.history([1, 2]), "PERMISSION_DENIED")
    assert drafted(trainer) == 0
    assert drafted(visit("reader", "run-2")) == 0
    assert drafted(visit("operator", "other"))


def test_a_token_is_good_for_its_rights_alone(visit: Callable[..., DraftClient]) -> None:
    visit("trainer").ingest([1, 2], [Response(TEXT)], epoch=0)
    reader = visit("reader")
    refused(lambda: reader.ingest([1, 2], [Response([9])]), "PERMISSION_DENIED")
    refused(reader.drop_namespace, "PERMISSION_DENIED")
    refused(visit("trainer").drop_namespace, "PERMISSION_DENIED")
    (session,) = reader.open([[1, 2]])
    assert len(reader.step([session], [TEXT[:5]])[0])
    reader.close([session])  # its commit is refused, its stream continues
    reader.flush(5.0)
    assert reader.stats().dropped_commits == 1
    assert drafted(reader)
    assert len(visit("trainer").history([1, 2])) == 1
    assert visit("operator").drop_namespace() == 1


def test_a_token_is_taken_back_once_the_file_can_be_read(
    guarded: Server, visit: Callable[..., DraftClient], files: Path
) -> None:
    """Size, time and inode of the file do not reveal that it was corrected."""
    path, sound = files / "tokens.toml", TOKENS
    broken = "[[" + sound[2:].replace('name = "trainer"', "name = 'trainer\"")
    assert len(broken) == len(sound)

    def fill(content: str) -> None:
        path.write_text(content)
        os.utime(path, (10**9, 10**9))

    def told() -> tuple[float, dict[str, str]]:
        gauge = 'histospec_watched_file_unreadable{file="tokens"}'
        return guarded.metrics()[gauge], json.loads(guarded.get("/status")[1])["unreadable_files"]

    client = visit("revoked")
    visit("trainer").ingest([1, 2], [Response(TEXT)], epoch=0)
    assert told() == (0, {})
    fill(broken)
    eventually(lambda: told() == (1, {"tokens": "it is not TOML"}), "a file that cannot be read is not told")
    assert drafted(client)  # the previous contents stay in force
    guarded.logged("tokens cannot be read")
    hints = json.loads(guarded.get("/status")[1])["hints"]
    assert [hint["level"] for hint in hints if "tokens cannot be read" in hint["title"]] == ["bad"]
    fill(sound)
    eventually(lambda: told() == (0, {}), "it is not read again")
    assert drafted(visit("trainer"))
    eventually(lambda: not drafted(client), "the token still works")


@pytest.mark.parametrize(
    ("left", "code", "words"),
    [
        ('rights = ["write"]', "PERMISSION_DENIED", "token 'revoked' has no right to read in namespace 'run-1'"),
        ('namespaces = ["other"]', "PERMISSION_DENIED", "token 'revoked' has no right to read in namespace 'run-1'"),
        (None, "UNAUTHENTICATED", "was removed from the"),
    ],
)
def test_a_running_stream_loses_what_its_token_lost(
    start_server: Starter, files: Path, connect: Connector, left: str | None, code: str, words: str
) -> None:
    """The stream ends with its next message, even if that is only a step."""
    server = start_server("--tokens", str(files / "tokens.toml"))
    wire = connect(server.endpoint)
    messages: queue.SimpleQueue[pb.DraftRequest | None] = queue.SimpleQueue()
    metadata = (("authorization", f"Bearer {SECRETS['revoked']}"),)
    answers: Any = wire.stub.Draft(iter(messages.get, None), metadata=metadata, timeout=60)
    messages.put(pb.DraftRequest(sequence=1, opens=[wire.open(1, namespace="run-1")], step=wire.step([1], [[5]])))
    assert next(answers).sequence == 1
    (files / "tokens.toml").write_text(TOKENS + (REVOKED + left if left else ""))

    def ended() -> bool:
        messages.put(pb.DraftRequest(sequence=2, step=wire.step([1], [[5]])))
        return next(answers, None) is None

    with pytest.raises(grpc.RpcError) as caught:
        eventually(ended, "the stream goes on")
    assert caught.value.code().name == code
    assert words in str(caught.value.details())
    messages.put(None)


def test_plain_text_and_strange_authorities_get_nowhere(
    guarded: Server, visit: Callable[..., DraftClient], files: Path
) -> None:
    visit("trainer").ingest([1, 2], [Response(TEXT)], epoch=0)
    strange = files / "strange.pem"
    trustme.CA().cert_pem.write_to_path(strange)
    for tls in (None, Tls(ca=str(strange))):
        with DraftClient(guarded.endpoint, "run-1", token=SECRETS["trainer"], tls=tls, deadline=0.5) as client:
            refused(partial(client.history, [1, 2]), "UNAVAILABLE")
            assert drafted(client) == 0


def test_clients_show_certificates_where_they_are_asked_for(start_server: Starter, files: Path) -> None:
    certificate = certificates.of_server(files)
    server = start_server(*certificate, "--tls-client-ca", str(files / "ca.pem"))
    ca = str(files / "ca.pem")
    known = Tls(ca, str(files / "client.pem"), str(files / "client.key"))
    with DraftClient(server.endpoint, "run", tls=known, deadline=5.0) as client:
        client.ingest([1, 2], [Response(TEXT)], epoch=0)
        assert drafted(client)
    with DraftClient(server.endpoint, "run", tls=Tls(ca), deadline=0.5) as client:
        refused(lambda: client.history([1, 2]), "UNAVAILABLE")
        assert drafted(client) == 0


def test_new_certificates_are_taken_up_without_a_restart(
    guarded: Server, visit: Callable[..., DraftClient], files: Path
) -> None:
    """Certificates of another authority: clients that trust it can connect now, and open streams stay."""
    old = visit("trainer")
    old.ingest([1, 2], [Response(TEXT)], epoch=0)
    assert drafted(old)
    authority = trustme.CA()
    fresh = authority.issue_cert("127.0.0.1")
    (files / "server.pem").write_bytes(b"".join(blob.bytes() for blob in fresh.cert_chain_pems))
    fresh.private_key_pem.write_to_path(files / "server.key")
    authority.cert_pem.write_to_path(files / "new-ca.pem")

    def gets_in() -> bool:
        tls = Tls(ca=str(files / "new-ca.pem"))
        with DraftClient(guarded.endpoint, "run-1", token=SECRETS["trainer"], tls=tls, deadline=5.0) as client:
            return drafted(client) > 0

    eventually(gets_in, "the new certificate is not taken up")
    assert drafted(old)


def test_metrics_say_when_the_certificate_expires(guarded: Server, files: Path, authority: trustme.CA) -> None:
    def shown() -> float:
        return guarded.metrics()["histospec_certificate_expiry_timestamp_seconds"]

    def expiry(pem: bytes) -> float:
        return x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()

    assert shown() == expiry((files / "server.pem").read_bytes())
    soon = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=3)
    fresh = authority.issue_cert("127.0.0.1", not_after=soon)
    chain = b"".join(blob.bytes() for blob in fresh.cert_chain_pems)
    in_force = shown()
    (files / "server.pem").write_bytes(chain)
    assert shown() == in_force  # the matching key has not arrived yet
    unreadable = 'histospec_watched_file_unreadable{file="certificates"}'
    assert guarded.metrics()[unreadable] == 1
    fresh.private_key_pem.write_to_path(files / "server.key")
    assert shown() == expiry(chain) == int(soon.timestamp())
    assert guarded.metrics()[unreadable] == 0
    (files / "server.pem").write_text("nothing")
    assert shown() == expiry(chain)
    assert guarded.metrics()[unreadable] == 1


def test_no_secret_is_said_aloud(guarded: Server, visit: Callable[..., DraftClient]) -> None:
    trainer = visit("trainer")
    trainer.ingest([1, 2], [Response(TEXT)], epoch=0)
    refused(lambda: visit("no-such-token-0123456789").history([1]), "UNAUTHENTICATED")
    shown = guarded.get("/status")[1]
    assert '"shard"' in shown
    guarded.terminate()
    guarded.wait()
    said = shown + repr(guarded.log) + repr(trainer.config)
    assert not [secret for secret in [*SECRETS.values(), "no-such-token"] if secret in said]


def test_status_shows_its_token(guarded: Server, files: Path) -> None:
    (files / "token").write_text(SECRETS["reader"] + "\n")
    command = ("status", guarded.endpoint, "--http", guarded.http, "--tls-ca", files / "ca.pem")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HISTOSPEC_")}

    def status(*flags: str, **variables: str) -> int:
        code, told = histospec(*command, *flags, env=environment | variables).end()
        assert ("SERVING" in told) == (code == 0), told
        return code

    file = str(files / "token")
    assert status() == 1
    assert status("--token-file", file) == 0
    assert status(HISTOSPEC_TOKEN=SECRETS["reader"]) == 0
    assert status(HISTOSPEC_TOKEN_FILE=file) == 0
    assert status("--token-file", file, HISTOSPEC_TOKEN="another-0123456789") == 0  # the flag has priority


@pytest.mark.parametrize(
    ("flags", "state"),
    [("--tls-client-ca", "SERVING"), ("", "its certificate cannot be verified from here")],
)
def test_a_shard_asks_its_peer_over_tls(
    start_server: Starter, guarded: Server, files: Path, flags: str, state: str
) -> None:
    """A peer whose certificate cannot be verified is not reported as unavailable."""
    certificate = certificates.of_server(files)
    certificate += (flags, str(files / "ca.pem")) if flags else ()
    server = start_server(*certificate, "--peers", f"other={guarded.endpoint}")

    def shown() -> dict[str, Any]:
        status: dict[str, Any] = json.loads(server.get("/status")[1])
        return status

    def states() -> dict[str, str]:
        return {shard["name"]: shard["state"] for shard in shown()["shards"]}

    eventually(lambda: states()["other"] == state, "the peer is not asked")
    assert states()[server.endpoint] == "SERVING"
    assert not [hint for hint in shown()["hints"] if "other" in hint["title"]]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[[token]]\nname = 'a'", "give either secret or sha256"),
        ("[[token]]\nname = 'a'\nsecret = 'brief'", "token.0.secret"),
        ("[[token]]\nname = 'a'\nsha256 = 'abc'", "token.0.sha256"),
        ("[[token]]\nname = 'a'\nsecret = 'long-enough-0123456'\nrights = ['all']", "token.0.rights.0"),
        ("[[tokens]]", "unknown key; known are token"),
        ("= =", "it is not TOML"),
    ],
)
def test_a_token_file_that_makes_no_sense_is_refused(
    start_server: Starter, tmp_path: Path, content: str, sentence: str
) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(content)
    with pytest.raises(RuntimeError, match="ended with 2") as caught:
        start_server("--tokens", str(path))
    assert sentence in str(caught.value)
    assert "brief" not in str(caught.value)
    assert "long-enough" not in str(caught.value)


def test_a_token_removed_under_load_is_named_in_the_log_and_in_a_hint(
    guarded: Server, visit: Callable[..., DraftClient], files: Path
) -> None:
    """Its workers try again for ever; the secret itself is nowhere."""
    client = visit("revoked")
    (session,) = client.open([[1, 2]])
    client.step([session], [[3]])
    (files / "tokens.toml").write_text(TOKENS)

    def counted() -> bool:
        client.step([session], [[3]])
        return guarded.metrics()['histospec_rpc_errors_total{code="UNAUTHENTICATED",method="Draft"}'] >= 2

    eventually(counted)
    refused(visit("no-such-token-0123456789").topology, "UNAUTHENTICATED")
    refusals = guarded.logged("rpc refused", 2)
    assert {line["level"] for line in refusals} == {"warning"}
    reasons = {str(line["reason"]) for line in refusals}
    digest = hashlib.sha256(b"no-such-token-0123456789").hexdigest()
    assert reasons == {
        "authorization: token 'revoked' was removed from the server's token file",
        f"authorization: this server does not know the token; its sha256 begins with {digest[:8]}",
    }
    (hint,) = [
        hint for hint in json.loads(guarded.get("/status")[1])["hints"] if hint["title"] == "The server rejects callers"
    ]
    assert all(reason in hint["text"] for reason in reasons)
    said = json.dumps([guarded.log, json.loads(guarded.get("/status")[1])])
    assert not [secret for secret in (SECRETS["revoked"], "no-such-token-0123456789", digest) if secret in said]


def test_every_code_of_rejected_callers_is_counted_from_0(guarded: Server) -> None:
    """An alert sees an increase only of a series that was there before."""
    for code in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
        assert guarded.metrics()[f'histospec_rpc_errors_total{{code="{code}",method="Draft"}}'] == 0
