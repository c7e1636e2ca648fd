"""A disaster rehearsal: a service is backed up by the chart's jobs, loses its machines and volumes, and is restored."""

import os
import shutil
from pathlib import Path

import pytest
import trustme

from histospec.client import DraftClient
from tests.deploy.test_chart_backup import VALUES, args
from tests.support import certificates
from tests.support.charts import render
from tests.support.children import histospec
from tests.support.histories import Written, expected, found, write, writings
from tests.support.object_store import ObjectStore
from tests.support.servers import Starter, secret, with_tokens
from tests.support.waiting import eventually

SHARDS = 3


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The contents of Secrets: tokens and certificates, where pods find them."""
    folder = tmp_path / "etc"
    for name in ("token", "tls", "server"):
        (folder / name).mkdir(parents=True)
    with_tokens(folder / "server", operator={"rights": ["admin"]}, workers={})
    (folder / "token" / "token").write_text(secret("operator"))
    issued = certificates.issue(folder / "server", trustme.CA())
    for ours, theirs in (("ca.pem", "ca.crt"), ("client.pem", "tls.crt"), ("client.key", "tls.key")):
        shutil.copy(issued / ours, folder / "tls" / theirs)
    return folder


class Cluster:
    """The shards of a release, and the commands of its CronJobs."""

    def __init__(self, start: Starter, files: Path, store: ObjectStore, name: str) -> None:
        secrets = files / "server"
        flags = (*certificates.of_server(secrets), "--tls-client-ca", str(secrets / "ca.pem"))
        flags = (*flags, "--tokens", str(secrets / "tokens.toml"))
        self.servers = [start(*flags, name=f"{name}-{number}") for number in range(SHARDS)]
        self._files = files
        self._store = store
        self._rendered = render("--values", VALUES)

    @property
    def endpoint(self) -> str:
        return ",".join(f"run-histospec-{number}={server.endpoint}" for number, server in enumerate(self.servers))

    def words(self, name: str) -> list[str]:
        """Returns the command of a CronJob's container, with addresses and folders of this machine."""
        rendered = args(self._rendered, f"run-histospec-{name}")
        words = [word.replace("/etc/histospec", str(self._files)) for word in rendered]
        where = words.index("discover://run-histospec-headless.rl.svc:6378")
        words[where] = self.endpoint
        return words

    def run(self, name: str, code: int = 0) -> str:
        """Runs it as a Job would, with the Secret of the object store alone, to its end. Returns its output."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HISTOSPEC_")}
        ended, said = histospec(*self.words(name), env=kept | self._store.environment).end()
        assert ended == code, said
        return said

    def lose(self) -> None:
        for server in self.servers:
            server.kill()
            shutil.rmtree(server.data_dir)


@pytest.fixture
def worker(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Returns the environment of a worker: its certificate, and its token without the right to admin."""
    for name, file in (("CA", "ca.crt"), ("CERT", "tls.crt"), ("KEY", "tls.key")):
        monkeypatch.setenv(f"HISTOSPEC_TLS_{name}", str(files / "tls" / file))
    monkeypatch.setenv("HISTOSPEC_TOKEN", secret("workers"))


def drafted(endpoint: str, written: Written, text: list[int]) -> list[int]:
    with DraftClient(endpoint, written.namespace, deadline=10.0) as client:
        sessions = client.open([written.prompt], [written.name])
        (draft,) = client.step(sessions, [text])
        return [int(token) for token in draft.tokens]


@pytest.mark.usefixtures("worker")
def test_a_service_comes_back_from_its_backup(start_server: Starter, files: Path, object_store: ObjectStore) -> None:
    first = Cluster(start_server, files, object_store, "first")
    written, later = writings(seed=27), writings(seed=28, namespaces=["run-3"])
    write(first.endpoint, written)
    assert f": {len(written)} problems" in first.run("backup")
    write(first.endpoint, later)
    said = first.run("backup")
    assert f": {len(written) + len(later)} problems" in said
    newest = object_store.names("histospec")[-1]
    assert said.startswith(f"s3://backups/histospec/{newest}: ")
    first.lose()

    second = Cluster(start_server, files, object_store, "second")
    assert not any(found(second.endpoint, written))
    said = second.run("restore")
    assert said.startswith(f"s3://backups/histospec/{newest}: {len(written) + len(later)} problems")
    assert found(second.endpoint, [*written, *later]) == expected([*written, *later])
    assert " 0 responses, 0 tokens" in second.run("restore"), "a Job that runs again stores things twice"
    assert found(second.endpoint, [*written, *later]) == expected([*written, *later])

    # Drafts come from the newest epoch.
    (one, text) = next(
        (one, [int(token) for token in response.tokens])
        for one in written
        for response in one.responses[2]
        if len(response.tokens) > 20 and response.generated is None
    )
    eventually(lambda: drafted(second.endpoint, one, text[:8])[:4] == text[8:12], "drafts do not come back")


@pytest.mark.usefixtures("worker")
def test_workers_may_not_take_backups(start_server: Starter, files: Path, object_store: ObjectStore) -> None:
    cluster = Cluster(start_server, files, object_store, "guarded")
    (files / "token" / "token").write_text(secret("workers"))
    assert "token 'workers' has no right to admin" in cluster.run("backup", code=1)
