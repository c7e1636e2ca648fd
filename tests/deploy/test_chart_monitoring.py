"""The chart's objects for the Prometheus operator and the autoscaler."""

import re
from typing import Any

import yaml

from tests.support.charts import one, render
from tests.support.programs import ROOT

ON = "serviceMonitor.enabled=true,prometheusRule.enabled=true"
SCALED = "store.kind=redis,store.url=redis://redis,autoscaling.enabled=true"


def rules(*sets: str) -> dict[str, dict[str, Any]]:
    rendered = one(render("--set", ",".join((ON, *sets))), "PrometheusRule")
    return {rule["alert"]: rule for group in rendered["spec"]["groups"] for rule in group["rules"]}


def endpoint(*sets: str) -> dict[str, Any]:
    (endpoint,) = one(render("--set", ",".join((ON, *sets))), "ServiceMonitor")["spec"]["endpoints"]
    assert isinstance(endpoint, dict)
    return endpoint


def scaled_by(*sets: str) -> dict[str, Any]:
    (metric,) = one(render("--set", ",".join((SCALED, *sets))), "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert isinstance(metric, dict)
    return metric


def test_the_namespace_of_a_series_stays_the_runs() -> None:
    assert endpoint()["honorLabels"] is True


def test_relabelings_come_after_the_charts_own() -> None:
    own = {"targetLabel": "job", "replacement": "rl/run-histospec"}
    dropped = {"action": "drop", "regex": "python_.*"}
    assert endpoint()["relabelings"] == [own]
    assert "metricRelabelings" not in endpoint()
    for key, expected in {"relabelings": [own, dropped], "metricRelabelings": [dropped]}.items():
        assert endpoint(f"serviceMonitor.{key}[0].action=drop,serviceMonitor.{key}[0].regex=python_.*")[key] == expected


def test_rules_look_for_the_job_that_the_servicemonitor_sets() -> None:
    assert endpoint("prometheusRule.job=drafts")["relabelings"] == [{"targetLabel": "job", "replacement": "drafts"}]
    for rule in rules("prometheusRule.job=drafts").values():
        assert set(re.findall(r'job=~?"(.*?)"', rule["expr"])) <= {"drafts"}
    assert rules("serviceMonitor.enabled=false,prometheusRule.job=drafts")


def test_alerts_can_be_left_out_by_name() -> None:
    left_out = {"HistoSpecHitRateLow", "HistoSpecPodPending"}
    some = rules(f"prometheusRule.disabled={{{','.join(sorted(left_out))}}}")
    assert rules().keys() - some.keys() == left_out


def test_runbooks_lead_to_where_the_docs_are() -> None:
    base = "https://git.example.com/blob/main/"
    for rule in rules(f"prometheusRule.runbookBase={base}").values():
        assert rule["annotations"]["runbook_url"].startswith(f"{base}docs/runbooks.md#")


def test_the_autoscaler_asks_for_the_metric_that_the_adapter_makes() -> None:
    (rule,) = yaml.safe_load((ROOT / "deploy" / "prometheus" / "adapter.yaml").read_text())["rules"]["custom"]
    metric = scaled_by()
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    assert metric["pods"]["target"] == {"type": "AverageValue", "averageValue": "0.6"}


def test_the_autoscaler_goes_by_cpu_where_it_is_told_to() -> None:
    expected = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 70}}
    assert scaled_by("autoscaling.metric=cpu,autoscaling.target=70")["resource"] == expected
