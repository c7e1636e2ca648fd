"""Redis: its password is in a Secret that the shards read, never in a ConfigMap."""

from pathlib import Path

import pytest

from tests.support.charts import container, one, options, refusal, render, shard, template
from tests.support.redis_processes import RedisProcess
from tests.support.servers import Starter

VALUES = Path(__file__).parent / "values"


@pytest.mark.parametrize(
    "url", ["redis://:hunter2@redis:6379", "rediss://app:hunter2@redis", "redis+cluster://:hun/ter2@a:1\\,b:2"]
)
def test_a_password_in_a_config_map_is_refused_and_not_repeated(url: str) -> None:
    said = refusal("--set", f"store.kind=redis,store.url={url}")
    assert "store.url is stored in a ConfigMap and must not contain a user or a password" in said
    assert "store.existingSecret" in said
    assert "ter2" not in said


def test_the_url_of_a_secret_is_a_file_that_the_server_reads() -> None:
    manifests = render("--values", VALUES / "redis-ca.yaml")
    found = options(manifests)
    assert found["store-file"] == "/etc/histospec/store/url"
    assert "store" not in found
    (volume,) = [entry for entry in shard(manifests)["volumes"] if entry["name"] == "store"]
    assert volume["secret"]["secretName"] == "histospec-redis"
    assert volume["secret"]["items"] == [{"key": "address", "path": "url"}]
    mounts = {mount["name"]: mount for mount in container(manifests)["volumeMounts"]}
    assert mounts["store"]["mountPath"] == "/etc/histospec/store"
    # A file mounted alone, by subPath, would never change.
    assert not any("subPath" in mount for mount in mounts.values())
    assert not any("STORE" in entry["name"] for entry in container(manifests)["env"])


def test_the_server_reads_the_mounted_url(redis_server: RedisProcess, start_server: Starter, tmp_path: Path) -> None:
    mounted = tmp_path / "store"
    mounted.mkdir()
    (mounted / "url").write_text(f"{redis_server.url}\n")
    text = one(render("--values", VALUES / "redis.yaml", "--set", "security.insecure=true"), "ConfigMap")
    file = tmp_path / "histospec.toml"
    file.write_text(
        text["data"]["histospec.toml"].replace("/etc/histospec/store", str(mounted)).replace("64GiB", "1GiB")
    )
    server = start_server("--config", str(file), "--log-level", "info")
    server.drain()


def test_the_authority_of_redis_can_be_mounted() -> None:
    manifests = render("--values", VALUES / "redis-ca.yaml")
    assert {"name": "redis-ca", "mountPath": "/etc/histospec/redis-ca", "readOnly": True} in container(manifests)[
        "volumeMounts"
    ]
    assert {"name": "redis-ca", "secret": {"secretName": "redis-ca"}} in shard(manifests)["volumes"]


@pytest.mark.parametrize("name", ["data", "store", "tokens", "config"])
def test_a_volume_of_the_chart_cannot_be_replaced(name: str) -> None:
    assert "extraVolumes.0.name" in refusal("--set", f"extraVolumes[0].name={name}")


def test_a_url_without_a_password_may_be_a_value() -> None:
    assert options(render("--set", "store.kind=redis,store.url=rediss://redis:6380/2?replicas=1"))["store"] == (
        "rediss://redis:6380/2?replicas=1"
    )


def test_no_value_of_the_chart_holds_a_secret() -> None:
    """Users give names of Secrets; created tokens are only in a Secret."""
    text = template("--values", VALUES / "redis.yaml").stdout
    documents = text.split("\n---\n")
    assert ["\nkind: Secret\n" in document for document in documents if "worker-token: " in document] == [True]
