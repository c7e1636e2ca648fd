"""Sizes: the memory limit determines the index and the volume the file; sizes that do not fit are refused.

The chart and the server compute memory alike: the server does not warn about what the chart accepts.
"""

from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from pydantic import ByteSize, TypeAdapter

from histospec.server.rpc.governor import COPIES
from histospec.server.settings.budget import check_budget
from tests.support.charts import CHART, container, one, options, refusal, render, shard

QUANTITIES = ["10Gi", "10G", "0.5Ti", "1.5e10", "15E9", "2e+10", "10737418240", "128974848000m", "12345Mi",
              "99999999Ki", ".25Ti", "20.G", "30000000k", "0.00005P", "0.00000001E"]  # fmt: skip
GIB = 2**30
# What each suffix multiplies by, as Kubernetes documents its quantities.
SUFFIXES: dict[str, Fraction | int] = {
    "": 1, "m": Fraction(1, 1000), "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip


def size(text: object) -> int:
    return int(TypeAdapter(ByteSize).validate_python(text))


def exact(quantity: str) -> Fraction:
    """A quantity as Kubernetes reads it."""
    number = quantity.rstrip("kmKMGTPEi")
    return Fraction(number) * SUFFIXES[quantity[len(number) :]]


def memory(limit: str, *words: object) -> int:
    return size(options(render("--set-string", f"resources.limits.memory={limit}", *words))["memory"])


@pytest.mark.parametrize("limit", QUANTITIES)
def test_every_quantity_of_kubernetes_is_read(limit: str) -> None:
    headroom = min(max(exact(limit) / 5, Fraction(2 * GIB)), exact(limit) * Fraction(3, 4))
    assert 0 <= exact(limit) - headroom - memory(limit) < 2**20, "rounded down to a MiB"


def test_a_quantity_may_be_a_number(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text("resources: {limits: {memory: 10737418240}}\npersistence: {size: 21474836480}\n")
    found = options(render("--values", file))
    assert (size(found["memory"]), size(found["disk"])) == (8 * GIB, 18 * GIB)


@pytest.mark.parametrize("limit", ["10gi", "10K", "10GiB", "many", "1e", "-1Gi", "1Gi2"])
def test_what_is_no_quantity_is_refused(limit: str) -> None:
    assert "resources.limits.memory" in refusal("--set-string", f"resources.limits.memory={limit}")


@pytest.mark.parametrize(
    ("limit", "index"),
    [("10Gi", 8 * GIB), ("80Gi", 64 * GIB), ("4Gi", 2 * GIB), ("2Gi", GIB // 2), ("512Mi", GIB // 8)],
)
def test_the_index_leaves_a_fifth_or_two_gib_of_the_limit(limit: str, index: int) -> None:
    assert memory(limit) == index


def test_a_large_backlog_is_left_room_for() -> None:
    assert memory("10Gi", "--set", "options.max-backlog=1280MiB") == 7 * GIB


def test_large_messages_are_left_room_for() -> None:
    """The server lets messages that arrive take three times the largest one."""
    assert memory("10Gi", "--set", "options.max-message=63MiB") == 8 * GIB
    assert memory("10Gi", "--set", f"options.max-message={64 + 512}MiB") == 8 * GIB - COPIES * GIB // 2
    words = ("--set", "options.max-message=320MiB,resources.limits.memory=10Gi")
    assert f"Give the index at most {8459 - COPIES * 256}MiB" in refusal(*words, "--set", "options.memory=8GiB")


def test_an_index_larger_than_its_container_is_refused_with_both_numbers() -> None:
    said = refusal("--set", "options.memory=64GiB,resources.limits.memory=10Gi,sizing.allowTight=true")
    assert "options.memory is 64GiB, and resources.limits.memory is 10Gi" in said
    assert "Give it at most 8459MiB" in said


@pytest.mark.parametrize(
    ("index", "limit", "most"),
    [("64GiB", "68Gi", "59187MiB"), ("9GiB", "10Gi", "8459MiB"), ("1600MiB", "2Gi", "1335MiB")],
)
def test_a_tight_index_needs_consent(index: str, limit: str, most: str) -> None:
    words = ("--set", f"options.memory={index},resources.limits.memory={limit}")
    said = refusal(*words)
    assert f"options.memory is {index}, and resources.limits.memory is {limit}" in said
    assert f"Give the index at most {most}" in said
    assert options(render(*words, "--set", "sizing.allowTight=true"))["memory"] == index
    assert options(render("--set", f"options.memory={most},resources.limits.memory={limit}"))["memory"] == most


def test_a_backlog_that_fills_the_limit_is_refused() -> None:
    said = refusal("--set", "resources.limits.memory=2Gi,options.max-backlog=2GiB")
    assert "resources.limits.memory is 2Gi, and the process needs that much besides its index" in said


def test_without_a_limit_the_server_decides() -> None:
    assert "memory" not in options(render("--set", "resources.limits.memory=null"))
    assert options(render("--set", "resources.limits.memory=null,options.memory=1GiB"))["memory"] == "1GiB"


def test_the_file_leaves_a_tenth_of_the_volume() -> None:
    assert size(options(render())["disk"]) == 45 * GIB
    assert size(options(render("--set", "persistence.size=200G"))["disk"]) == 180 * 10**9 // 2**20 * 2**20
    assert options(render("--set", "options.disk=49GiB"))["disk"] == "49GiB"
    assert options(render("--set-string", "options.disk=0"))["disk"] == "0"


def test_a_file_larger_than_its_volume_is_refused() -> None:
    assert "options.disk is 51GiB, but the volume has only 50Gi (persistence.size)" in refusal(
        "--set", "options.disk=51GiB"
    )
    assert "options.disk is 50GiB, but the volume has only 50G " in refusal(
        "--set", "options.disk=50GiB,persistence.size=50G"
    )
    said = refusal("--set", "mode=daemonset,options.disk=21GiB")
    assert "the volume has only 20Gi (emptyDir.dataSize)" in said


def test_a_shard_without_a_volume_cannot_fill_its_node() -> None:
    for words in ("mode=daemonset", "persistence.enabled=false", "store.kind=redis,store.url=redis://redis"):
        manifests = render("--set", words)
        volumes = {volume["name"]: volume for volume in shard(manifests)["volumes"]}
        assert volumes["data"]["emptyDir"] == {"sizeLimit": "20Gi"}, words
        assert volumes["tmp"]["emptyDir"] == {"sizeLimit": "1Gi"}, words
        assert options(manifests).get("disk") == (None if "redis" in words else "18GiB"), words


def test_of_a_folder_of_the_node_the_server_learns_the_size() -> None:
    assert "disk" not in options(render("--set", "mode=daemonset,daemonset.hostPath=/srv/histospec"))
    words = "mode=daemonset,daemonset.hostPath=/srv/histospec,options.disk=900GiB"
    assert options(render("--set", words))["disk"] == "900GiB"


def test_problems_are_forgotten_after_a_month_unless_told() -> None:
    assert options(render())["retention"] == 30
    assert options(render("--set", "options.retention=0"))["retention"] == 0


def test_the_defaults_ask_for_what_they_may_use() -> None:
    resources = container(render())["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]


def test_volumes_outlive_shards_unless_told() -> None:
    policy = one(render(), "StatefulSet")["spec"]["persistentVolumeClaimRetentionPolicy"]
    assert policy == {"whenScaled": "Retain", "whenDeleted": "Retain"}
    given = one(render("--set", "persistence.retentionPolicy.whenDeleted=Delete"), "StatefulSet")["spec"]
    assert given["persistentVolumeClaimRetentionPolicy"] == {"whenScaled": "Retain", "whenDeleted": "Delete"}


def test_the_example_in_the_docs_is_taken(tmp_path: Path) -> None:
    page = (CHART.parents[1] / "docs" / "kubernetes.md").read_text()
    blocks = [part.partition("```")[0] for part in page.split("```yaml\n")[1:]]
    sized = [block for block in blocks if "limits:" in block]
    assert sized, "docs/kubernetes.md shows how to size a shard"
    for block in sized:
        (tmp_path / "values.yaml").write_text(block)
        assert yaml.safe_load(block)["resources"]["limits"]["memory"]
        render("--values", tmp_path / "values.yaml")


@pytest.mark.parametrize("limit", ["10Gi", "12Gi", "20Gi", "4Gi", "2800Mi", "68Gi", "1Gi", "1Ti"])
def test_what_the_chart_computes_it_takes_and_so_does_the_server(limit: str) -> None:
    given = options(render("--set", f"resources.limits.memory={limit}"))["memory"]
    assert options(render("--set", f"resources.limits.memory={limit},options.memory={given}"))["memory"] == given
    assert check_budget(size(given), True, int(exact(limit)), 2**50) == ""


@pytest.mark.parametrize("limit", ["10Gi", "15Gi", "68Gi", "2Gi", "100G"])
def test_the_server_has_no_word_against_the_largest_index_that_the_chart_takes(limit: str) -> None:
    said = refusal("--set", f"options.memory=4TiB,resources.limits.memory={limit}")
    most = said.partition("Give it at most ")[2].partition(",")[0]
    assert check_budget(size(most), True, int(exact(limit)), 2**50) == ""
    assert size(most) > exact(limit) * Fraction(6, 10)
