"""Install, upgrade and uninstall with Helm and a fake cluster that answers its look-ups."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.charts import CHART
from tests.support.cluster import Cluster, cluster

SECRET = "run-histospec-tokens"
SHARDS = "run-histospec"
VOLUME = "data-run-histospec"


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path) as found:
        yield found


def helm(on: Cluster, verb: str, *set_: str) -> str:
    """Installs or upgrades the release. Returns helm's error, or an empty text."""
    flags = ["--namespace", "rl", "--disable-openapi-validation", "--set", ",".join(set_)]
    done = on.helm(verb, "run", CHART, *flags)
    assert done.returncode == 0 or done.stderr
    return "" if done.returncode == 0 else done.stderr


def replicas(on: Cluster) -> int:
    return int(on.objects("StatefulSet")[SHARDS]["spec"]["replicas"])


def stop(on: Cluster, shards: int) -> None:
    """Returns the cluster of a release whose shards are gone and whose volumes remain."""
    assert helm(on, "install", f"replicas={shards}") == ""
    for i in range(shards):
        on.claim(f"{VOLUME}-{i}")
    assert helm(on, "upgrade", "replicas=0") == ""


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
    assert f"Secret {SECRET} exists without a key tokens.toml" in helm(empty, "upgrade", "replicas=1")


def test_a_second_rotation_does_not_end_the_token_that_a_team_has(empty: Cluster) -> None:
    """`previous: false` of the first rotation is still in the values when the second one comes."""
    team = "tokens.callers[0].name=a,tokens.callers[0].namespaces={a-*},tokens.callers[0]"
    assert helm(empty, "install", f"{team}.rotation=1,tokens.callers[0].previous=false") == ""
    before = empty.objects("Secret")["run-histospec-token-a"]["data"]["token"]
    said = helm(empty, "upgrade", f"{team}.rotation=2,tokens.callers[0].previous=false")
    assert "rotation 2 gives a a new token, and previous is false" in said
    assert "remove previous and upgrade" in said
    assert helm(empty, "upgrade", f"{team}.rotation=1,tokens.callers[0].previous=false") == "", "nothing is rotated"
    assert helm(empty, "upgrade", f"{team}.rotation=2") == ""
    assert empty.objects("Secret")["run-histospec-token-a"]["data"]["previous-token"] == before
    assert helm(empty, "upgrade", f"{team}.rotation=2,tokens.callers[0].previous=false") == ""
    assert empty.objects("Secret")["run-histospec-token-a"]["data"].keys() == {"token"}


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
    assert "which is deleted" in helm(empty, "upgrade", "replicas=0,persistence.retentionPolicy.whenScaled=Delete")
    assert helm(empty, "upgrade", "replicas=0") == ""
    assert replicas(empty) == 0


def test_shards_that_were_stopped_need_consent_to_stay_away(empty: Cluster) -> None:
    """Three shards, none, one: the volumes show that there were three."""
    stop(empty, 3)
    said = helm(empty, "upgrade", "replicas=1")
    assert "replicas is 1, and volumes of further shards exist (data-run-histospec-1, data-run-histospec-2)" in said
    for step in ("Set replicas to 3", "docs/backup.md", "delete the volumes", "set scaleDown.confirmReplicas to 1"):
        assert step in said
    assert replicas(empty) == 0
    assert "volumes of further shards" in helm(empty, "upgrade", "replicas=1,scaleDown.confirmReplicas=2")
    assert helm(empty, "upgrade", "replicas=1,scaleDown.confirmReplicas=1") == ""
    assert helm(empty, "upgrade", "options.threads=2") == "", "it asks again while the shard runs"
    assert helm(empty, "upgrade", "replicas=2") == ""


@pytest.mark.parametrize("count", [0, 3, 4])
def test_stopped_shards_return_without_a_word(empty: Cluster, count: int) -> None:
    stop(empty, 3)
    assert helm(empty, "upgrade", f"replicas={count}") == ""
    assert replicas(empty) == count


def test_volumes_without_a_statefulset_count_too(empty: Cluster) -> None:
    """After an uninstall, or `kubectl delete statefulset --cascade=orphan`."""
    stop(empty, 3)
    assert empty.helm("uninstall", "run", "--namespace", "rl").returncode == 0
    assert "Set replicas to 3 to use all" in helm(empty, "install", "replicas=2")
    assert helm(empty, "install", "replicas=3") == ""


def test_volumes_of_others_do_not_count(empty: Cluster) -> None:
    stop(empty, 1)
    empty.claim(f"{VOLUME}-2")["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    for name in ("data-run-histospec-1-0", "data-run-histospec-0x9", "data-other-histospec-5", "7"):
        empty.claim(name)
    assert helm(empty, "upgrade", "replicas=1") == ""


def test_shards_without_volumes_leave_none_behind(empty: Cluster) -> None:
    none = "persistence.enabled=false"
    assert helm(empty, "install", none) == ""
    for i in range(3):
        empty.claim(f"{VOLUME}-{i}")
    assert helm(empty, "upgrade", none, "replicas=0,scaleDown.confirmReplicas=0") == ""
    assert helm(empty, "upgrade", none, "replicas=1") == ""


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("replicas=1", "store.kind=redis,store.existingSecret=redis", "store.kind is redis, and the shards"),
        ("replicas=1", "persistence.enabled=false", "persistence.enabled is false, and the shards"),
        (
            "store.kind=redis,store.existingSecret=redis,replicas=1",
            "store.kind=sqlite,store.existingSecret=",
            "StatefulSet run-histospec has no volumes",
        ),
    ],
)
def test_histories_move_to_another_store_by_steps(empty: Cluster, before: str, after: str, said: str) -> None:
    assert helm(empty, "install", before) == ""
    first = empty.objects("StatefulSet")[SHARDS]
    refused = helm(empty, "upgrade", before, after)
    assert said in refused
    steps = ("histospec snapshot", "kubectl -n rl delete statefulset run-histospec", "3. Upgrade", "histospec restore")
    places = [refused.index(step) for step in steps]
    assert places == sorted(places)
    assert "docs/kubernetes.md" in refused
    # Shards that would lack volumes must end; shards with volumes may keep running.
    assert ("--cascade=orphan" in refused) == ("volumeClaimTemplates" in first["spec"])
    assert empty.objects("StatefulSet")[SHARDS] == first
    empty.remove("StatefulSet")
    assert helm(empty, "upgrade", before, after) == ""
    assert helm(empty, "upgrade", before, after, "options.threads=2") == ""


@pytest.mark.parametrize(
    ("change", "said", "step"),
    [
        ("size=80Gi", "persistence.size is 80Gi, and the volumes of StatefulSet run-histospec have 50Gi",
         """patch pvc data-run-histospec-0 --patch '{"spec":{"resources":{"requests":{"storage":"80Gi"}}}}'"""),
        ("size=20Gi", "persistence.size is 20Gi", "Volumes cannot shrink"),
        ("storageClass=fast",
         'persistence.storageClass is "fast", and the volumes of StatefulSet run-histospec have ""',
         "Existing volumes stay unchanged"),
        ("accessModes={ReadWriteOncePod}", 'persistence.accessModes is ["ReadWriteOncePod"]', "--cascade=orphan"),
    ],
)  # fmt: skip
def test_volumes_change_by_steps(empty: Cluster, change: str, said: str, step: str) -> None:
    assert helm(empty, "install", "replicas=1") == ""
    refused = helm(empty, "upgrade", f"persistence.{change}")
    for words in (said, step, "docs/kubernetes.md"):
        assert words in refused
    assert ("delete statefulset run-histospec --cascade=orphan" in refused) == ("cannot shrink" not in refused)
    empty.remove("StatefulSet")
    assert helm(empty, "upgrade", f"persistence.{change}") == ""
    assert helm(empty, "upgrade", f"persistence.{change}", "options.threads=2") == ""


def test_two_changes_of_volumes_are_both_named(empty: Cluster) -> None:
    assert helm(empty, "install", "persistence.storageClass=slow") == ""
    refused = helm(empty, "upgrade", "persistence.size=80Gi,persistence.storageClass=fast")
    assert "persistence.size is 80Gi" in refused
    assert 'persistence.storageClass is "fast"' in refused


@pytest.mark.parametrize("size", ["51200Mi", "53687091200", "0.048828125Ti"])
def test_a_size_in_other_words_is_no_other_size(empty: Cluster, size: str) -> None:
    """The API server normalizes quantities."""
    assert helm(empty, "install", "replicas=1") == ""
    kept = empty.objects("StatefulSet")[SHARDS]["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]
    kept["storage"] = size
    assert helm(empty, "upgrade", "persistence.size=50Gi") == ""


def test_shards_of_a_statefulset_need_consent_to_become_a_daemonset(empty: Cluster) -> None:
    assert helm(empty, "install", "replicas=3") == ""
    said = helm(empty, "upgrade", "mode=daemonset")
    assert "mode is daemonset, and the shards of StatefulSet run-histospec have their histories on volumes" in said
    for step in ("histospec snapshot", "histospec restore", "docs/kubernetes.md", "scaleDown.confirmReplicas to 0"):
        assert step in said
    assert "and its volumes, and" not in said
    assert "confirmReplicas to 0" in helm(empty, "upgrade", "mode=daemonset,scaleDown.confirmReplicas=3")
    assert empty.objects("DaemonSet") == {}
    assert helm(empty, "upgrade", "mode=daemonset,scaleDown.confirmReplicas=0") == ""
    assert (empty.objects("StatefulSet"), list(empty.objects("DaemonSet"))) == ({}, [SHARDS])
    assert helm(empty, "upgrade", "mode=daemonset") == "", "it asks although nothing is left to lose"


def test_a_daemonset_may_take_the_volumes_along(empty: Cluster) -> None:
    assert helm(empty, "install", "persistence.retentionPolicy.whenDeleted=Delete") == ""
    assert "Helm would delete the StatefulSet and its volumes" in helm(empty, "upgrade", "mode=daemonset")


def test_shards_with_redis_become_a_daemonset_without_a_word(empty: Cluster) -> None:
    redis = "store.kind=redis,store.existingSecret=redis"
    assert helm(empty, "install", redis) == ""
    assert helm(empty, "upgrade", redis, "mode=daemonset") == ""


@pytest.mark.parametrize("change", ["tokens.existingSecret=mine", "security.insecure=true"])
def test_a_rollback_returns_to_the_made_tokens(empty: Cluster, change: str) -> None:
    assert helm(empty, "install", "replicas=1") == ""
    made = empty.objects("Secret")[SECRET]["data"]
    assert helm(empty, "upgrade", change) == ""
    assert helm(empty, "upgrade", change, "options.threads=2") == ""
    done = empty.helm("rollback", "run", "1", "--namespace", "rl")
    assert done.returncode == 0, done.stderr
    assert empty.objects("Secret")[SECRET]["data"] == made


def test_a_secret_that_the_user_made_is_left_alone(empty: Cluster) -> None:
    """The Secret has the name that the chart would choose."""
    mine = f"tokens.existingSecret={SECRET}"
    assert helm(empty, "install", "replicas=1") == ""
    del empty.objects("Secret")[SECRET]["metadata"]["annotations"]
    assert helm(empty, "upgrade", mine) == ""
    assert "kind: Secret" not in empty.helm("get", "manifest", "run", "--namespace", "rl").stdout


def test_fewer_shards_with_redis_need_no_word(empty: Cluster) -> None:
    redis = "store.kind=redis,store.existingSecret=redis"
    assert helm(empty, "install", redis, "replicas=4") == ""
    assert helm(empty, "upgrade", redis, "replicas=1") == ""
    assert replicas(empty) == 1


def test_autoscaling_begins_with_the_shards_that_run(empty: Cluster) -> None:
    """Kubernetes sets a number that a manifest no longer has to 1."""
    redis = "store.kind=redis,store.existingSecret=redis"
    assert helm(empty, "install", redis, "replicas=4") == ""
    assert helm(empty, "upgrade", redis, "replicas=4,autoscaling.enabled=true") == ""
    assert replicas(empty) == 4
    empty.objects("StatefulSet")[SHARDS]["spec"]["replicas"] = 7
    assert helm(empty, "upgrade", redis, "autoscaling.enabled=true,options.threads=2") == ""
    assert replicas(empty) == 7, "the number of the autoscaler"
    assert helm(empty, "upgrade", redis, "replicas=0") == ""
    assert helm(empty, "upgrade", redis, "autoscaling.enabled=true,autoscaling.minReplicas=3") == ""
    assert replicas(empty) == 3


def test_pods_may_be_left_to_a_person_from_now_on(empty: Cluster) -> None:
    """Kubernetes adds a partition to a rolling update, and refuses it with OnDelete."""
    assert helm(empty, "install", "replicas=1") == ""
    empty.objects("StatefulSet")[SHARDS]["spec"]["updateStrategy"]["rollingUpdate"] = {"partition": 0}
    assert helm(empty, "upgrade", "updateStrategy.type=OnDelete,updateStrategy.rollingUpdate.partition=1") == ""
    assert empty.objects("StatefulSet")[SHARDS]["spec"]["updateStrategy"] == {"type": "OnDelete"}
    assert helm(empty, "upgrade", "updateStrategy.rollingUpdate.partition=1") == ""
    strategy = empty.objects("StatefulSet")[SHARDS]["spec"]["updateStrategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"partition": 1}}


def test_another_number_of_revisions_is_refused_with_the_steps(empty: Cluster) -> None:
    assert helm(empty, "install", "replicas=1") == ""
    said = helm(empty, "upgrade", "revisionHistoryLimit=3")
    assert "revisionHistoryLimit is 3, and StatefulSet run-histospec has 10" in said
    assert "kubectl -n rl delete statefulset run-histospec --cascade=orphan" in said
    empty.remove("StatefulSet")
    assert helm(empty, "upgrade", "revisionHistoryLimit=3") == ""
    assert helm(empty, "upgrade", "revisionHistoryLimit=3,options.threads=2") == ""
    assert helm(empty, "upgrade", "mode=daemonset,revisionHistoryLimit=5,scaleDown.confirmReplicas=0") == ""
    assert helm(empty, "upgrade", "mode=daemonset,revisionHistoryLimit=6") == "", "a DaemonSet may change it"


@pytest.mark.parametrize("kind", ["statefulset", "daemonset"])
@pytest.mark.parametrize(
    ("change", "name"), [("fullnameOverride=other", "other"), ("nameOverride=drafts", "run-drafts")]
)
def test_another_name_needs_consent(empty: Cluster, kind: str, change: str, name: str) -> None:
    """Helm deletes the shards of the old name, and those of the new one find neither volumes nor tokens."""
    mode = f"mode={kind}"
    assert helm(empty, "install", mode) == ""
    said = helm(empty, "upgrade", mode, change)
    assert f"has the name {SHARDS}, and fullnameOverride, or else nameOverride, now gives {name}" in said
    for step in ("Set fullnameOverride to run-histospec", "histospec snapshot", "scaleDown.confirmReplicas to 0"):
        assert step in said
    shards = {"statefulset": "StatefulSet", "daemonset": "DaemonSet"}[kind]
    assert empty.objects(shards).keys() == {SHARDS}
    assert helm(empty, "upgrade", mode, change, "scaleDown.confirmReplicas=0") == ""
    assert empty.objects(shards).keys() == {name}
    assert helm(empty, "upgrade", mode, change) == "", "it asks although nothing is left to lose"


def test_another_selector_is_refused(empty: Cluster) -> None:
    """Kubernetes cannot change it."""
    assert helm(empty, "install", "fullnameOverride=drafts") == ""
    said = helm(empty, "upgrade", "fullnameOverride=drafts,nameOverride=other")
    assert "nameOverride changes the selector of StatefulSet drafts" in said
    assert "Set nameOverride to histospec to keep it" in said
    assert helm(empty, "upgrade", "fullnameOverride=drafts,nameOverride=histospec") == ""
    empty.remove("StatefulSet")
    assert helm(empty, "upgrade", "fullnameOverride=drafts,nameOverride=other") == ""


def test_other_releases_and_charts_may_have_other_names(empty: Cluster) -> None:
    assert helm(empty, "install", "replicas=1") == ""
    assert empty.helm("install", "eval", CHART, "--namespace", "rl", "--disable-openapi-validation").returncode == 0
    assert helm(empty, "upgrade", "options.threads=1") == ""
    labels = empty.objects("StatefulSet")["eval-histospec"]["metadata"]["labels"]
    labels |= {"app.kubernetes.io/instance": "run", "helm.sh/chart": "redis-1.0.0"}
    assert helm(empty, "upgrade", "options.threads=2") == ""


def test_old_defaults_are_not_taken_along(empty: Cluster, tmp_path: Path) -> None:
    """`--reuse-values` keeps the defaults of the previous chart, which lacks newer values."""
    old = tmp_path / "histospec"
    (old / "templates").mkdir(parents=True)
    (old / "Chart.yaml").write_text("apiVersion: v2\nname: histospec\nversion: 0.1.0\n")
    kept = [line for line in (CHART / "values.yaml").read_text().split("\n") if line != "  create: true"]
    (old / "values.yaml").write_text("\n".join(kept))
    assert empty.helm("install", "run", old, "--namespace", "rl", "--disable-openapi-validation").returncode == 0
    flags = ["--namespace", "rl", "--disable-openapi-validation", "--reuse-values"]
    done = empty.helm("upgrade", "run", CHART, *flags)
    assert done.returncode != 0
    assert "these are the defaults of an older chart, which --reuse-values keeps" in done.stderr
