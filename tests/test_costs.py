"""What a drafted token costs: core, clients, server and pages go by the same numbers."""

import inspect
import re
from pathlib import Path

import pytest

from histospec.client import AsyncDraftClient, DraftClient
from histospec.native import Engine
from histospec.protocol.costs import DEFAULT_VERIFY_COST, HOPELESS_VERIFY_COST, NOTHING_PAYS, STARTING_SPEED_UP

ROOT = Path(__file__).parent.parent


def test_the_engine_starts_from_the_speed_up_that_workers_assume() -> None:
    source = (ROOT / "native/src/draft/estimator.h").read_text()
    (start,) = re.findall(r"struct Yield \{(.*?)\};", source, re.DOTALL)
    begins = {name: float(number) for name, number in re.findall(r"float (\w+) = (\d+);", start)}
    assert begins.keys() == {"tokens", "steps", "drafted"}
    speed_up = begins["tokens"] / (begins["steps"] + DEFAULT_VERIFY_COST * begins["drafted"])  # Estimator::speed_up
    assert speed_up == pytest.approx(STARTING_SPEED_UP)


def test_where_drafts_stop_follows_from_the_speed_up() -> None:
    assert HOPELESS_VERIFY_COST * STARTING_SPEED_UP == 1
    assert pytest.approx(HOPELESS_VERIFY_COST, abs=0.005) == NOTHING_PAYS


def test_the_engine_has_the_default() -> None:
    (default,) = re.findall(r"verify_cost: [^=]*= ([0-9.]+)", Engine.step.__doc__ or "")
    assert float(default) == pytest.approx(DEFAULT_VERIFY_COST)


@pytest.mark.parametrize("client", [DraftClient, AsyncDraftClient])
@pytest.mark.parametrize("method", ["step", "send"])
def test_clients_have_the_default(client: type, method: str) -> None:
    assert inspect.signature(getattr(client, method)).parameters["verify_cost"].default == DEFAULT_VERIFY_COST


def test_people_are_told_the_same() -> None:
    said = f"From {NOTHING_PAYS} on nothing is worth drafting"
    for page in ("deploy/grafana/histospec.json", "helm/histospec/files/dashboard.json", "docs/verify-cost.md"):
        assert said in (ROOT / page).read_text(), page
    stub = (ROOT / "native/python/_core.pyi").read_text()
    assert set(re.findall(r"verify_cost: float = ([0-9.]+)", stub)) == {str(DEFAULT_VERIFY_COST)}
