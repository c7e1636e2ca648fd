"""What the chart's NOTES.txt tells the user of a release to do."""

import shutil
from pathlib import Path
from typing import Any

import yaml

from tests.support.charts import CHART, one, render


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


def worker(text: str) -> dict[str, Any]:
    """The part of the notes about the pods of workers: `env`, and with tokens `volumeMounts` and `volumes`."""
    block = text.partition("add to their pods:\n")[2].partition("  Start vLLM")[0]
    return dict(yaml.safe_load(block))


def environment(text: str) -> dict[str, Any]:
    """The variables of the pods of workers: their values, or where their values come from."""
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in worker(text)["env"]}
