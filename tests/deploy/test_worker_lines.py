"""The lines of a rollout worker are those of helm/histospec/files/worker.yaml, wherever users read or copy them."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from histospec.client.doctor.facts import Demand
from tests.support.charts import CHART, environment, notes, worker
from tests.support.examples import FOLDER, NAMED, example, vllm_arguments, worker_pods
from tests.support.programs import ROOT

SOURCE = yaml.safe_load((CHART / "files" / "worker.yaml").read_text())
SPECULATION = json.loads(SOURCE["vllm"]["speculative-config"])
SCHEDULER = SOURCE["vllm"]["scheduler-cls"]
PATTERNS = ("README.md", "docs/**/*.md", "deploy/**/*.yaml", "helm/**/README.md", "client/vllm/__init__.py")
SHOWN = [path for pattern in PATTERNS for path in sorted(ROOT.glob(pattern))]
"""Files that show the lines. The chart's templates have them rendered: see test_chart_notes.py."""
SHOWING = {
    "README.md", "docs/quickstart.md", "docs/frameworks/verl.md", "deploy/kubernetes/examples/sidecar.yaml",
    "deploy/kubernetes/examples/verl-rayjob.yaml", "deploy/kubernetes/examples/vllm.yaml", "client/vllm/__init__.py",
}  # fmt: skip
"""Files that must show them."""
CONFIG = re.compile(
    r"""method["']?\s*[:=]\s*["']?custom_class\b.{0,240}?num_speculative_tokens["']?\s*[:=]\s*\w+""", re.DOTALL
)
KEYS = re.compile(r"""\b(method|model|num_speculative_tokens)["']?\s*[:=]\s*["']?([\w.]+)""")
CLASS = re.compile(r"""\bscheduler[-_]cls["']?\s*[ :=]\s*["']?([\w.]+\.\w+)""")


def configs(text: str) -> list[dict[str, str]]:
    """Every `speculative_config` with custom_class in a text: JSON, YAML, Python or Hydra's overrides."""
    return [dict(KEYS.findall(found)) for found in CONFIG.findall(text)]


@pytest.mark.parametrize("file", SHOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_shows_the_lines_of_the_source(file: Path) -> None:
    text = file.read_text()
    expected = {key: str(value) for key, value in SPECULATION.items()}
    assert all(found == expected for found in configs(text)), configs(text)
    assert set(CLASS.findall(text)) <= {SCHEDULER}
    if str(file.relative_to(ROOT)) in SHOWING:
        assert configs(text), "no speculative_config"
        assert CLASS.search(text), "no scheduler_cls"


def test_a_changed_line_is_found() -> None:
    for before, after in (("16", "32"), ("HistoSpecProposer", "Proposer"), ('"model": ', '"modle": ')):
        (found,) = configs(f"--speculative-config '{SOURCE['vllm']['speculative-config'].replace(before, after)}'")
        assert found != {key: str(value) for key, value in SPECULATION.items()}
    assert {str(file.relative_to(ROOT)) for file in SHOWN} >= SHOWING


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_a_page_exports_the_variables_of_the_source(page: str) -> None:
    (line,) = re.findall(r"^export (HISTOSPEC_.*)$", (ROOT / page).read_text(), re.M)
    exported = dict(word.split("=", 1) for word in shlex.split(line))
    assert exported.keys() == {"HISTOSPEC_ENDPOINT", "HISTOSPEC_NAMESPACE"}
    assert exported.items() <= SOURCE["environment"].items()


def ours(container: dict[str, Any]) -> dict[str, Any]:
    found = {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}
    return {name: value for name, value in found.items() if name.startswith("HISTOSPEC_")}


def test_the_pods_of_the_examples_have_the_lines_of_the_notes(tmp_path: Path) -> None:
    text = notes(tmp_path, *NAMED)
    pods = dict(worker_pods())
    assert len(pods) == 3
    for name, spec in pods.items():
        (container,) = spec["containers"]
        assert ours(container) == environment(text), name
        for key, there in (("volumeMounts", container["volumeMounts"]), ("volumes", spec["volumes"])):
            assert all(line in there for line in worker(text)[key]), (name, key)


def test_the_page_about_kubernetes_shows_the_notes(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    (block,) = re.findall(r"^```yaml\n(env:\n.*?volumes:\n.*?)^```", page, re.M | re.S)
    assert yaml.safe_load(block) == worker(notes(tmp_path, *NAMED))


def test_the_notes_have_the_variables_of_the_source(tmp_path: Path) -> None:
    said = environment(notes(tmp_path))
    assert said.keys() == SOURCE["environment"].keys()
    differ = {name for name in said if said[name] != SOURCE["environment"][name]}
    assert differ == {"HISTOSPEC_ENDPOINT"}, "the address of the release alone"


def test_the_sidecar_has_the_lines_of_the_source() -> None:
    container, _ = example("sidecar.yaml")[0]["spec"]["containers"]
    expected = {name: SOURCE["environment"][name] for name in ("HISTOSPEC_ENDPOINT", "HISTOSPEC_NAMESPACE")}
    assert ours(container) == expected
    assert {path.name for path in FOLDER.glob("*.yaml") if "name: HISTOSPEC_" in path.read_text()} == {
        "sidecar.yaml", "verl-rayjob.yaml", "vllm.yaml"
    }  # fmt: skip


@pytest.mark.parametrize("name", ["sidecar.yaml", "vllm.yaml"])
def test_the_arguments_of_a_container_are_those_of_the_source(name: str) -> None:
    given = dict(word.removeprefix("--").split("=", 1) for word in vllm_arguments(name) if word.startswith("--"))
    assert json.loads(given["speculative-config"]) == SPECULATION
    assert given["scheduler-cls"] == SCHEDULER


def test_the_source_names_what_there_is() -> None:
    said = (ROOT / "docs" / "configuration.md").read_text()
    assert all(f"| `{name}` |" in said for name in SOURCE["environment"])
    package, _, scheduler = SCHEDULER.rpartition(".")
    for name in (SPECULATION["model"], SCHEDULER):
        assert name.startswith(f"{package}.")
    exported = re.search(r"__all__ = \[(.*?)\]", (ROOT / "client" / "vllm" / "__init__.py").read_text())
    assert exported
    assert {scheduler, SPECULATION["model"].rpartition(".")[2]} == set(re.findall(r'"(\w+)"', exported[1]))
    assert Demand().draft_tokens == SPECULATION["num_speculative_tokens"], "the doctor asks for what vLLM will ask for"
