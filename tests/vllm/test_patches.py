"""The table of patches agrees with the installed vLLM and with the functions that HistoSpec replaces."""

import importlib
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support.engines import StartEngine
from tests.vllm.conftest import RUNNER

pytestmark = pytest.mark.vllm

INSTALL_ALL = """
import json, os
from importlib import import_module
from types import SimpleNamespace

import vllm
from histospec.client.vllm import releases, settings
from histospec.client.vllm.patches import PATCHES, plugin, sampling, weight_versions
from histospec.client.vllm.patches.replacing import is_replaced

def owner(symbol):
    module, _, path = symbol.partition(":")
    found = import_module(module)
    *owners, name = path.split(".")
    for each in owners:
        found = getattr(found, each)
    getattr(found, name)
    return found, name

def replaced():
    return [p.symbol for p in PATCHES if is_replaced(*places[p.symbol])]

PATCHES = [p for p in PATCHES if not releases.before(vllm.__version__, p.since)]
places = {p.symbol: owner(p.symbol) for p in PATCHES}
# vLLM sets `forward` of each sampler when it makes one.
(of_a_sampler,) = [symbol for symbol in places if symbol.endswith(":TopKTopPSampler.forward")]
sampler = places[of_a_sampler][0]()
places[of_a_sampler] = sampler, "forward"
said = {"before": replaced()}
plugin.register()
said["by the plug-in"] = replaced()
os.environ |= {"HISTOSPEC_ENABLE": "1", "HISTOSPEC_SAMPLING": "coupled"}
settings.check = lambda config: None
for _ in range(2):
    for name in (None, "vllm.v1.core.sched.scheduler.Scheduler", "histospec.client.vllm.HistoSpecScheduler"):
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(scheduler_cls=name),
            speculative_config=SimpleNamespace(method="draft_model", model="a/drafter"),
        )
        plugin.preparing(lambda self, vllm_config: None)(None, config)
        said.setdefault(f"in a worker of {name}", replaced())
    if any(p.room == "runner_v2" for p in PATCHES):
        config.use_v2_model_runner = True
        plugin.preparing(lambda self, vllm_config: None)(None, config)
    weight_versions.install()
    plugin.register()
    sampling.couple(sampler)
    said["all"] = replaced()
    once = {symbol: getattr(*place) for symbol, place in places.items()}
    said.setdefault("first", {symbol: id(function) for symbol, function in once.items()})
said["table"] = list(places)
said["twice"] = [symbol for symbol, function in once.items() if id(function) != said["first"][symbol]]
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said() -> Any:
    """Symbols of the table that are replaced before and after installing all; in a process of its own."""
    pytest.importorskip("vllm", reason="needs a vLLM build in the environment")
    command = [sys.executable, "-c", INSTALL_ALL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_symbol_of_the_table_is_replaced_once(said: Any) -> None:
    assert said["before"] == []
    assert said["all"] == said["table"]
    assert said["twice"] == []


def test_workers_of_other_engines_are_left_alone(said: Any) -> None:
    mark = said["by the plug-in"]
    assert mark[-1] == "vllm.v1.worker.worker_base:WorkerBase.__init__"
    assert all(symbol.startswith("vllm.config.vllm:VllmConfig.") for symbol in mark[:-1])
    assert said["in a worker of None"] == said["in a worker of vllm.v1.core.sched.scheduler.Scheduler"] == mark
    assert len(said["in a worker of histospec.client.vllm.HistoSpecScheduler"]) == len(mark) + 3


def test_an_engine_that_drafts_has_those_of_its_workers_and_scheduler(engine: StartEngine, nowhere: str) -> None:
    from histospec.client.vllm.patches import PATCHES
    from histospec.client.vllm.patches.replacing import is_replaced

    engine(nowhere)
    others = {"v1": ("drafter", "runner_v2", "sampling_v2"), "v2": ("drafter", "undrafted", "cpu", "sampling_v2")}[
        RUNNER
    ]
    for patch in PATCHES:
        if patch.installed_by.startswith(("HistoSpecScheduler", "WorkerBase")) and patch.room not in others:
            module, _, path = patch.symbol.partition(":")
            owner = importlib.import_module(module)
            *owners, name = path.split(".")
            for each in owners:
                owner = getattr(owner, each)
            assert is_replaced(owner, name), patch.symbol
