"""The adapter drafts with a vLLM that has no model runner V1: a copy of the installed one, without V1's files."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.engines import Prompts
from tests.support.servers import Server

pytestmark = [pytest.mark.vllm, pytest.mark.v2]

V1 = (
    "v1/worker/gpu_model_runner.py",
    "v1/worker/cpu_model_runner.py",
    "v1/worker/xpu_model_runner.py",
    "v1/sample/rejection_sampler.py",
    "v1/spec_decode/custom_class_proposer.py",
)
WORKER = "v1/worker/cpu_worker.py"
IMPORT = "from vllm.v1.worker.cpu_model_runner import CPUModelRunner\n"

VISITS = """
import json, os, sys
from importlib.util import find_spec
from pathlib import Path
import vllm
from vllm import LLM, SamplingParams
model, prompts, drafts, result = json.loads(sys.argv[1])
llm = LLM(model=model, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=512,
          max_num_seqs=16, kv_cache_memory_bytes=64 << 20, seed=0, disable_log_stats=False, **drafts)
sampling = SamplingParams(temperature=0, max_tokens=40, detokenize=False)
visits = [llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
          for _ in range(2)]
accepted = next(m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens")
Path(result).write_text(json.dumps({
    "vllm": str(Path(vllm.__file__).parent),
    "v1": find_spec("vllm.v1.worker.gpu_model_runner") is not None,
    "responses": [[[list(output.outputs[0].token_ids)] for output in visit] for visit in visits],
    "accepted": accepted,
}))
"""


@pytest.fixture
def without_v1(tmp_path: Path) -> Path:
    """A copy of the installed vLLM, of links, without V1's files."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    copy = tmp_path / "packages" / "vllm"
    shutil.copytree(Path(spec.origin).parent, copy, copy_function=os.symlink)
    for file in V1:
        (copy / file).unlink()
    worker = (copy / WORKER).read_text()
    assert worker.count(IMPORT) == 1  # the only one at the start that remains
    (copy / WORKER).unlink()
    (copy / WORKER).write_text(worker.replace(IMPORT, ""))
    return copy


def test_drafts_need_nothing_of_v1(
    without_v1: Path, server: Server, namespace: str, tiny_model: str, prompts: Prompts,
    expected: list[Prompts], drafts: dict[str, object], tmp_path: Path,
) -> None:  # fmt: skip
    root, result = Path(__file__).parents[2], tmp_path / "result.json"
    variables = {
        "PYTHONPATH": os.pathsep.join([str(without_v1.parent), str(root)]), "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HISTOSPEC_ENDPOINT": server.endpoint, "HISTOSPEC_NAMESPACE": namespace, "HISTOSPEC_DEADLINE": "5",
        "HISTOSPEC_VERIFY_COST": "0.05",
    }  # fmt: skip
    command = [sys.executable, "-c", VISITS, json.dumps([tiny_model, prompts, drafts, str(result)])]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    found = json.loads(result.read_text())
    assert (found["vllm"], found["v1"]) == (str(without_v1), False)
    assert found["responses"] == [expected] * 2
    assert found["accepted"] > len(prompts)
