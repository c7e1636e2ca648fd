"""HISTOSPEC_ENABLE=1 and nothing else: vLLM drafts with the arguments that trainers make.

Each trainer needs its package, or its sources on PYTHONPATH, beside vLLM; without them its test is skipped. verl's own
tests are in tests/verl.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from histospec.client import DraftClient
from tests.support.clients import texts
from tests.support.engines import Prompts
from tests.support.ports import free_port
from tests.support.servers import Server

pytestmark = [pytest.mark.vllm, pytest.mark.newest]

SCRIPT = Path(__file__).parent / "trainer_engine.py"


@pytest.mark.parametrize("trainer", ["trl_colocate", "trl_server", "openrlhf", "skyrl", "prime_rl", "nemo_rl"])
def test_the_arguments_of_a_trainer_lead_to_drafts(
    tiny_model: str, server: Server, prompts: Prompts, tmp_path: Path, trainer: str
) -> None:
    module = trainer.removesuffix("_colocate").removesuffix("_server")
    if find_spec(module) is None:
        pytest.skip(f"needs {module} in the environment")
    variables = {
        "HISTOSPEC_ENABLE": "1", "HISTOSPEC_ENDPOINT": server.endpoint, "HISTOSPEC_NAMESPACE": trainer,
        "HISTOSPEC_DEADLINE": "5", "HISTOSPEC_VERIFY_COST": "0.05", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, str(SCRIPT), trainer, tiny_model, json.dumps(prompts), str(tmp_path / "found")]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    found: Any = json.loads((tmp_path / "found").read_text())
    first, second = found["responses"]
    assert first == second
    assert found["accepted"] > 0
    with DraftClient(server.endpoint, trainer) as client:
        for prompt, group in zip(prompts, first, strict=True):
            assert texts(client.history(prompt)) == group * 2
