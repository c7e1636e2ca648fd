"""What a person sees of wrong values: one line for each, not a chain of templates."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.support.charts import CHART, refusal, render, template
from tests.support.releases import HELMS, helm_program


def lines(said: str) -> list[str]:
    """The problems that an error names, and the lines of a schema error."""
    return [line for line in said.splitlines() if line.startswith("- ")]


TYPICAL = [
    ("replica=2", "replica", "not allowed"),
    ("replicas=two", "replicas", "integer"),
    ("options.memory=8Gi", "options.memory is 8Gi; must be a size for the server, such as 8GiB or 500MB", ""),
    ("persistence.size=50GiB", "persistence.size is 50GiB; must be a quantity of Kubernetes, such as 10Gi or 500M", ""),
    ("store.kind=redis", "store.kind redis needs a URL: set store.url or store.existingSecret", ""),
    ("tokens=null", "tokens, tokens.create, tokens.callers: nothing is given. Either a section of your values", ""),
    ("autoscaling.enabled=true", "autoscaling.enabled needs store.kind redis", ""),
    ("backup.enabled=true", "backup.enabled needs a destination: set backup.destination.persistentVolumeClaim or", ""),
]


@pytest.mark.parametrize("version", HELMS)
@pytest.mark.parametrize(("words", "said", "further"), TYPICAL, ids=[words for words, _, _ in TYPICAL])
def test_a_typical_mistake_is_one_line(version: str, words: str, said: str, further: str) -> None:
    error = refusal("--set", words, path=helm_program(version))
    (line,) = lines(error)
    assert said in line
    assert further in line
    assert len(error.splitlines()) <= 6, error


def test_all_wrong_values_are_named_at_once() -> None:
    error = refusal(
        "--set", "store.kind=redis,backup.enabled=true,terminationGracePeriodSeconds=1,options.memory=64GiB"
    )
    assert [line.split()[1] for line in lines(error)] == [
        "store.kind",
        "options.memory",
        "terminationGracePeriodSeconds",
        "backup.enabled",
    ]
    error = refusal("--set", "options.memory=8Gi,resources.limits.memory=10GiB,emptyDir.tmpSize=x")
    assert [line.split()[1] for line in lines(error)] == [
        "options.memory",
        "emptyDir.tmpSize",
        "resources.limits.memory",
    ]


def sections(values: dict[str, Any], before: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield before + key
            yield from sections(value, f"{before}{key}.")


EVERYTHING_ON = (
    "backup.enabled=true,backup.destination.persistentVolumeClaim=a,serviceMonitor.enabled=true,"
    "prometheusRule.enabled=true,dashboard.enabled=true,daemonset.hostPath=/a"
)


@pytest.mark.parametrize("section", list(sections(yaml.safe_load((CHART / "values.yaml").read_text()))))
def test_an_empty_section_is_named_or_means_nothing(section: str) -> None:
    """A values file that says `tokens:` and nothing below it removes the defaults of this section."""
    for mode in ("statefulset", "daemonset,store.kind=redis,store.url=redis://a"):
        done = template("--set", f"mode={mode},{EVERYTHING_ON},{section}=null")
        if done.returncode:
            (line,) = lines(done.stderr)
            assert section in line, done.stderr


def leaves(values: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{before}{key}.")
        else:
            yield before + key, value


LEAVES = dict(leaves(yaml.safe_load((CHART / "values.yaml").read_text())))
ELSEWHERE = re.compile(
    r"^options\.|resources\.|ecurityContext\.|Probe\.|labels\.|^topologySpread|^updateStrategy\.type$"
)
"""The server and Kubernetes have defaults for these; null among the labels and constraints is none of them; the schema
refuses null for a strategy."""


def test_null_is_the_default_or_is_refused_by_name() -> None:
    null = [leaf for leaf in LEAVES if not ELSEWHERE.search(leaf)]
    words = ",".join(f"{leaf}=null" for leaf in null)
    refused = lines(refusal("--set", words))[0].removeprefix("- ").partition(": nothing is given")[0].split(", ")
    for leaf in null:
        if LEAVES[leaf]:
            assert leaf in refused, f"{leaf} has the default {LEAVES[leaf]!r}"
    harmless = ",".join(f"{leaf}=null" for leaf in null if leaf not in refused)
    for mode in (
        "security.insecure=true",
        "tokens.existingSecret=a,tls.existingSecret=a,service.type=NodePort,test.args={a},backup.tokenSecret=a",
        "mode=daemonset,store.kind=redis,store.url=redis://a,security.insecure=true",
        "store.kind=redis,store.url=redis://a,autoscaling.enabled=true,tokens.existingSecret=a,backup.tokenSecret=a",
    ):
        on = f"{EVERYTHING_ON},{mode}"
        assert render("--set", f"{harmless},{on}") == render("--set", on), mode
