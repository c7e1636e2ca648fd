"""Renders the Helm chart with the real `helm`."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.programs import ROOT, TOOLS, program

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

CHART = ROOT / "helm" / "histospec"
RELEASE, NAMESPACE = "run", "rl"

Manifest = dict[str, Any]

VALIDATE = """
const [root, packages] = [process.argv[1], JSON.parse(process.argv[2])];
for (const manifest of JSON.parse(await new Response(process.stdin).text())) {
  const [group] = manifest.apiVersion.split("/");
  const path = `${root}/@kubernetes-models/${packages[group]}/${manifest.apiVersion}/${manifest.kind}.js`;
  new (await import("file://" + path))[manifest.kind](manifest).validate();
}
"""
MODELS = {
    "monitoring.coreos.com": "prometheus-operator",
    "keda.sh": "keda",
    "gateway.networking.k8s.io": "gateway-api",
    "cert-manager.io": "cert-manager",
}
"""By API group, the npm package of @kubernetes-models with the schemas of an operator."""


def helm(*words: object, path: str = "") -> "subprocess.CompletedProcess[str]":
    """Runs helm; also where it fails. path: of another helm than that of build/tools."""
    return subprocess.run([path or program("helm"), *map(str, words)], capture_output=True, text=True, timeout=120)


def template(
    *words: object, version: str = "1.30.0", chart: Path = CHART, path: str = ""
) -> "subprocess.CompletedProcess[str]":
    """`helm template` as for a cluster of this version."""
    return helm("template", RELEASE, chart, "--namespace", NAMESPACE, "--kube-version", version, *words, path=path)


def render(*words: object, version: str = "1.30.0", chart: Path = CHART) -> list[Manifest]:
    """What the chart makes of these arguments, tests included."""
    done = template(*words, version=version, chart=chart)
    assert done.returncode == 0, done.stderr
    return objects_in(done.stdout)


def objects_in(text: str) -> list[Manifest]:
    """The objects of some YAML."""
    return [manifest for manifest in yaml.load_all(text, yaml.CSafeLoader) if manifest]


def shard(manifests: list[Manifest]) -> Manifest:
    """The spec of the pods that are shards."""
    (spec,) = [m["spec"]["template"]["spec"] for m in manifests if m["kind"] in ("StatefulSet", "DaemonSet")]
    return dict(spec)


def container(manifests: list[Manifest]) -> Manifest:
    """The container of a shard that runs the server."""
    (found,) = [entry for entry in shard(manifests)["containers"] if entry["name"] == "histospec"]
    return dict(found)


def options(manifests: list[Manifest]) -> Manifest:
    """The options that the chart gives the server."""
    return dict(tomllib.loads(one(manifests, "ConfigMap")["data"]["histospec.toml"]))


def refusal(*words: object, path: str = "") -> str:
    """What helm says of values that the chart refuses."""
    done = template(*words, path=path)
    assert done.returncode != 0, f"the chart takes {words}"
    return done.stderr


def one(manifests: list[Manifest], kind: str) -> Manifest:
    """The only manifest of a kind; the dashboard, a ConfigMap too, aside."""
    mine = [manifest for manifest in manifests if manifest["kind"] == kind]
    (found,) = [m for m in mine if not m.get("metadata", {}).get("name", "").endswith("-dashboard")]
    return found


def pod_of(manifest: Manifest) -> Any:
    """The specification of the pods that an object makes, or None."""
    if manifest["kind"] == "Pod":
        return manifest["spec"]
    spec = manifest.get("spec", {})
    return spec.get("jobTemplate", {}).get("spec", spec).get("template", {}).get("spec")


def operator_takes(manifests: list[Manifest]) -> "subprocess.CompletedProcess[str]":
    """Validates objects by the schemas of their operators; also where these refuse one."""
    node = program("node")
    for package in {MODELS[manifest["apiVersion"].partition("/")[0]] for manifest in manifests}:
        if not (TOOLS / "@kubernetes-models" / package).exists():
            pytest.skip(f"needs @kubernetes-models/{package}, see scripts/install-tools")
    return subprocess.run(
        [node, "--input-type=module", "--eval", VALIDATE, str(TOOLS), json.dumps(MODELS)],
        input=json.dumps(manifests), capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def notes(folder: Path, *words: object) -> str:
    """NOTES.txt of a release, rendered as a manifest, because helm shows it only after an installation.

    folder: where a copy of the chart goes. words: values, as options of helm.
    """
    chart = folder / "chart"
    if not chart.exists():
        shutil.copytree(CHART, chart)
        text = (chart / "templates" / "NOTES.txt").read_text()
        (chart / "templates" / "_notes.tpl").write_text(f'{{{{ define "notes" }}}}{text}{{{{ end }}}}')
        (chart / "templates" / "notes.yaml").write_text(
            'apiVersion: v1\nkind: Notes\ntext: |-\n  .\n  {{- include "notes" . | nindent 2 }}\n'
        )
    return str(one(render(*words, chart=chart), "Notes")["text"])


def worker(text: str) -> Manifest:
    """The part of the notes about the pods of workers: `env`, and with tokens `volumeMounts` and `volumes`."""
    block = text.partition("add to their pods:\n")[2].partition("  Start vLLM")[0]
    return dict(yaml.safe_load(block))


def environment(text: str) -> Manifest:
    """The variables of the pods of workers: their values, or where their values come from."""
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in worker(text)["env"]}
