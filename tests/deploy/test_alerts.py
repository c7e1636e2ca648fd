"""Alert rules: each does what it says, is tested, and leads to a runbook."""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support.servers import Server
from tests.support.wires import Wire

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "alerts.yaml"
TESTS = Path(__file__).with_name("alerts.test.yaml")
ALERTS = {rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}


@pytest.fixture
def promtool() -> Callable[..., None]:
    if not shutil.which("promtool"):
        pytest.skip("promtool is not installed (scripts/install-tools)")

    def run(*arguments: str) -> None:
        ran = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0, ran.stdout + ran.stderr

    return run


def test_rules_are_well_formed(promtool: Callable[..., None]) -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES))


def test_alerts_fire_when_they_should_and_only_then(promtool: Callable[..., None]) -> None:
    promtool("test", "rules", str(TESTS))


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_is_tested_both_ways(name: str) -> None:
    checks = [
        check
        for test in yaml.safe_load(TESTS.read_text())["tests"]
        for check in test["alert_rule_test"]
        if check["alertname"] == name
    ]
    assert any(check["exp_alerts"] for check in checks)
    assert any(not check["exp_alerts"] for check in checks)


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_says_how_bad_it_is_and_what_to_do(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert alert["annotations"].keys() == {"summary", "description", "runbook_url"}
    page, anchor = alert["annotations"]["runbook_url"].split("#")
    headings = re.findall(r"^### (.+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert anchor in [heading.lower() for heading in headings]


def test_alerts_ask_for_metrics_that_a_server_has(server: Server, wire: Wire) -> None:
    wire.ingest([1], [[2]])
    names = set(re.findall(r"^([a-z_]+)[ {]", server.get("/metrics")[1], re.MULTILINE))
    names |= {"histospec_certificate_expiry_timestamp_seconds"}  # with TLS alone
    names |= {"histospec_watched_file_unreadable"}  # with tokens or TLS
    expressions = " ".join(alert["expr"] for alert in ALERTS.values())
    asked = set(re.findall(r"\b(?:histospec|process)_[a-z_]+", expressions))
    assert asked
    assert not asked - names
