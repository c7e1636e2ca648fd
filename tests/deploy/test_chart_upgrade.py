"""Install, upgrade and uninstall, with Helm and a cluster that it asks what is there."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.charts import CHART
from tests.support.cluster import Cluster, cluster

SECRET = "run-histospec-tokens"
SHARDS = "run-histospec"


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path) as found:
        yield found


def helm(on: Cluster, verb: str, *set_: str) -> str:
    """Installs or upgrades the release; returns what helm says where it fails, else nothing."""
    flags = ["--namespace", "rl", "--disable-openapi-validation", "--set", ",".join(set_)]
    done = on.helm(verb, "run", CHART, *flags)
    assert done.returncode == 0 or done.stderr
    return "" if done.returncode == 0 else done.stderr


def replicas(on: Cluster) -> int:
    return int(on.objects("StatefulSet")[SHARDS]["spec"]["replicas"])


def test_tokens_stay_through_upgrade_uninstall_and_the_next_install(empty: Cluster) -> None:
    assert helm(empty, "install", "replicas=1") == ""
    made = empty.objects("Secret")[SECRET]["data"]
    assert made.keys() == {"worker-token", "admin-token", "tokens.toml"}
    assert helm(empty, "upgrade", "options.threads=2") == ""
    assert empty.objects("Secret")[SECRET]["data"] == made
    assert empty.helm("uninstall", "run", "--namespace", "rl").returncode == 0
    assert empty.objects("StatefulSet") == {}
    assert empty.objects("Secret")[SECRET]["data"] == made
    assert helm(empty, "install", "replicas=1") == ""
    assert empty.objects("Secret")[SECRET]["data"] == made


def test_what_was_added_to_the_secret_stays(empty: Cluster) -> None:
    assert helm(empty, "install", "replicas=1") == ""
    empty.objects("Secret")[SECRET]["data"]["trainer-token"] = "c2VjcmV0"
    assert helm(empty, "upgrade", "replicas=1") == ""
    assert empty.objects("Secret")[SECRET]["data"]["trainer-token"] == "c2VjcmV0"


def test_a_secret_without_the_file_is_named(empty: Cluster) -> None:
    assert helm(empty, "install", "replicas=1") == ""
    del empty.objects("Secret")[SECRET]["data"]["tokens.toml"]
    assert f"Secret {SECRET} is there, and has no key tokens.toml" in helm(empty, "upgrade", "replicas=1")


def test_fewer_shards_with_sqlite_need_consent(empty: Cluster) -> None:
    assert helm(empty, "install", "replicas=4") == ""
    assert helm(empty, "upgrade", "replicas=5") == ""
    said = helm(empty, "upgrade", "replicas=3")
    assert "replicas is 3, and 5 shards run, each with its own history in SQLite" in said
    for step in ("histospec snapshot", "histospec restore", "docs/backup.md", "set scaleDown.confirmReplicas to 3"):
        assert step in said
    assert "is deleted" not in said
    assert replicas(empty) == 5
    assert "set scaleDown.confirmReplicas to 3" in helm(empty, "upgrade", "replicas=3,scaleDown.confirmReplicas=4")
    assert helm(empty, "upgrade", "replicas=3,scaleDown.confirmReplicas=3") == ""
    assert replicas(empty) == 3
    assert "set scaleDown.confirmReplicas to 2" in helm(empty, "upgrade", "replicas=2,scaleDown.confirmReplicas=3")


def test_shards_that_stop_and_keep_their_volumes_lose_nothing(empty: Cluster) -> None:
    assert helm(empty, "install", "replicas=2") == ""
    assert "what they stored is deleted" in helm(
        empty, "upgrade", "replicas=0,persistence.retentionPolicy.whenScaled=Delete"
    )
    assert helm(empty, "upgrade", "replicas=0") == ""
    assert replicas(empty) == 0


def test_fewer_shards_with_redis_need_no_word(empty: Cluster) -> None:
    redis = "store.kind=redis,store.existingSecret=redis"
    assert helm(empty, "install", redis, "replicas=4") == ""
    assert helm(empty, "upgrade", redis, "replicas=1") == ""
    assert replicas(empty) == 1


def test_old_defaults_are_not_taken_along(empty: Cluster, tmp_path: Path) -> None:
    """`--reuse-values` keeps the defaults of the chart before, without the values that came later."""
    old = tmp_path / "histospec"
    (old / "templates").mkdir(parents=True)
    (old / "Chart.yaml").write_text("apiVersion: v2\nname: histospec\nversion: 0.1.0\n")
    kept = [line for line in (CHART / "values.yaml").read_text().split("\n") if line != "  create: true"]
    (old / "values.yaml").write_text("\n".join(kept))
    assert empty.helm("install", "run", old, "--namespace", "rl", "--disable-openapi-validation").returncode == 0
    flags = ["--namespace", "rl", "--disable-openapi-validation", "--reuse-values"]
    done = empty.helm("upgrade", "run", CHART, *flags)
    assert done.returncode != 0
    assert "these are the defaults of an older chart, as --reuse-values brings them" in done.stderr
