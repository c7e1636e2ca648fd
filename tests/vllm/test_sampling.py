"""At temperature 1 drafts do not change the distribution of samples, and the check would notice if they did."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import accepting, any_drafts, sampling_check
from tests.support.engines import StartEngine
from tests.support.servers import Server
from tests.support.told import Told
from tests.vllm.conftest import RUNNER

pytestmark = pytest.mark.vllm

RESPONSES = 20_000 if RUNNER == "v1" else 2_000  # interpreted kernels are slow
ENOUGH_TO_FAIL = 2_000
AT_A_TIME = 256  # responses, of the check's engine


def test_sampling_is_exact(
    engine: StartEngine, server: Server, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HISTOSPEC_VERIFY_COST", "0")
    result = sampling_check.check(engine(server.endpoint, **sampling_check.ENGINE).llm, tiny_model, RESPONSES)
    assert 0 < result["accepted"] < result["drafted"]
    assert max(result["z"]) < sampling_check.LIMIT


@pytest.mark.v2
@pytest.mark.parametrize("accepts", [False, True], ids=["", "accepting"])
def test_sampling_is_exact_with_any_draft(
    engine: StartEngine, nowhere: str, tiny_model: str, monkeypatch: pytest.MonkeyPatch, accepts: bool
) -> None:
    """Probable, improbable, cut and missing drafts. A sampler that accepts any token is the control."""
    prompt = sampling_check.PROMPT
    ((probable,),) = engine().generate([prompt], max_tokens=sampling_check.LENGTH)
    if accepts:
        accepting.make(monkeypatch)
    rollouts = engine(nowhere, **sampling_check.ENGINE)
    any_drafts.make(rollouts.scheduler, [[*prompt, *probable]], sampling_check.LENGTH)
    result = sampling_check.check(rollouts.llm, tiny_model, RESPONSES // 2)
    assert 0 < result["accepted"] < result["drafted"]
    assert (max(result["z"]) > sampling_check.LIMIT) == accepts, result


@pytest.mark.newest
@pytest.mark.v1
@pytest.mark.long
@pytest.mark.parametrize("method", ["draft_model", "eagle"])
@pytest.mark.parametrize("killed", [False, True], ids=["", "killed"])
def test_sampling_is_exact_with_two_drafters(
    engine: StartEngine,
    drafter: Callable[..., Any],
    server: Server,
    tiny_model: str,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    killed: bool,
) -> None:
    """A model's own drafter beside the server's drafts, and alone once the server is killed half-way."""
    monkeypatch.setenv("HISTOSPEC_VERIFY_COST", "0")
    monkeypatch.setenv("HISTOSPEC_MODEL_DRAFT_TOKENS", str(sampling_check.LENGTH))
    monkeypatch.setenv("HISTOSPEC_DEADLINE", "1" if killed else "5")
    settings = sampling_check.ENGINE | {"speculative_config": drafter(method, sampling_check.LENGTH)}
    rollouts = engine(server.endpoint, **settings)
    told = Told(rollouts)
    step, steps, half_way = rollouts.scheduler.schedule, itertools.count(), RESPONSES // AT_A_TIME

    def schedule(*args: Any, **kwargs: Any) -> Any:
        if killed and next(steps) == half_way:  # a batch takes two to five steps
            server.kill()
        return step(*args, **kwargs)

    rollouts.scheduler.schedule = schedule
    result = sampling_check.check(rollouts.llm, tiny_model, RESPONSES)
    assert (next(steps) > half_way) == killed
    assert 0 < told.accepted < told.drafted
    assert told.history > RESPONSES / 10
    assert max(result["z"]) < sampling_check.LIMIT, result


@pytest.mark.v1
@pytest.mark.long
def test_the_check_sees_what_vllm_does_without_the_repair(tiny_model: str, server: Server, namespace: str) -> None:
    """vLLM's CPU build alone is wrong (its issue 55005). When this fails, the repair can go."""
    settings = {
        "HISTOSPEC_ENDPOINT": server.endpoint, "HISTOSPEC_NAMESPACE": namespace, "HISTOSPEC_VERIFY_COST": "0",
        "HISTOSPEC_DEADLINE": "5", "HISTOSPEC_VLLM_CPU_FIX": "0",
    }  # fmt: skip
    command = [sys.executable, "-m", sampling_check.__name__, tiny_model, str(ENOUGH_TO_FAIL)]
    root, settings = Path(__file__).parents[2], os.environ | settings
    done = subprocess.run(command, cwd=root, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert 0 < result["accepted"] < result["drafted"]
    assert max(result["z"]) > sampling_check.LIMIT
