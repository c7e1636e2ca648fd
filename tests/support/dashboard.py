"""The dashboard's panels and expressions, with variables replaced for a Prometheus."""

import json
import math
from pathlib import Path
from typing import Any

from tests.support.prometheus import Prometheus

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "histospec.json").read_text())
RULES = ROOT / "deploy" / "prometheus" / "alerts.yaml"
PANELS = {panel["title"]: panel for panel in DASHBOARD["panels"] if panel["type"] != "row"}
CHOSEN = {"$job": ".*", "$instance": ".*", "$run": ".*", "$__rate_interval": "10s"}


def chosen(text: str, **values: str) -> str:
    """An expression with every variable of the dashboard set; to All where `values` does not name it."""
    for name, value in (CHOSEN | {f"${name}": value for name, value in values.items()}).items():
        text = text.replace(name, value)
    return text


def samples(prometheus: Prometheus, expression: str, **values: str) -> list[dict[str, Any]]:
    """What an expression yields now, as `Prometheus.query`, without what is not a number. `values`: see `chosen`."""
    return [s for s in prometheus.query(chosen(expression, **values)) if not math.isnan(float(s["value"][1]))]
