"""Rolls prompts out twice with drafts, as a trainer would, over two workers or as one of several data-parallel ranks.

    python parallel_engine.py MODEL PROMPTS(JSON) VERSION FILE ARGUMENTS(JSON, of vLLM)

It writes a file of JSON. Data-parallel ranks write files of the names result-*.json into one folder, and end together,
because those of a mixture of experts take part in each other's steps.

A process of its own with a limit of time: workers that wait for each other wait forever, and then the stack of every
thread says where. It reads the adapter's environment. `responses` holds a list of token ids for each prompt, of each
visit; `accepted`: drafted tokens that were; `version`: whether vLLM was told that its weights are of this version;
`patched`: for each worker, which of vLLM's functions HistoSpec has replaced there. With HISTOSPEC_TEST_KILL=1 the last
worker is killed in the middle of a third visit; `died`: the error that ended it.
"""

import faulthandler
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

SECONDS = 800  # below the limit of pytest, which would end this process without the stacks
STEPS_ALIVE = 4


def patched(worker: Any) -> list[str]:
    """Runs in a worker."""
    from histospec.client.vllm.patches import PATCHES
    from histospec.client.vllm.patches.replacing import is_replaced

    found = []
    for patch in PATCHES:
        module, _, name = patch.symbol.partition(":")
        *owners, last = name.split(".")
        owner: Any = importlib.import_module(module)
        for part in owners:
            owner = getattr(owner, part)
        if is_replaced(owner, last):
            found.append(patch.room)
    return sorted(found)


def pid(worker: Any) -> int:
    """Runs in a worker."""
    return os.getpid()


def killed(llm: Any, prompts: list[Any], sampling: Any) -> str:
    """Kills the last worker after some steps of a visit. Returns the name of the error that ends the visit."""
    last = llm.collective_rpc(pid)[-1]
    for number, prompt in enumerate(prompts):
        llm.llm_engine.add_request(f"killed-{number}", prompt, sampling)
    for _ in range(STEPS_ALIVE):
        llm.llm_engine.step()
    os.kill(last, signal.SIGKILL)
    try:
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
    except Exception as error:
        return type(error).__name__
    return ""


def main(model_path: Any, prompts: list[list[int]], version: Any, path: Any, arguments: Any) -> None:
    from vllm import LLM, SamplingParams

    from tests.support import asynchronous

    asynchronous.keep_as_set()
    llm = LLM(
        **{
            "model": model_path, "skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True,
            "max_model_len": 512, "max_num_seqs": 16, "kv_cache_memory_bytes": 64 << 20, "disable_log_stats": False,
            "seed": 0, "async_scheduling": os.environ.get("HISTOSPEC_TEST_ASYNC") == "1",
        }
        | json.loads(arguments)
    )  # fmt: skip
    told = hasattr(llm, "update_weight_version")
    if told:
        llm.update_weight_version(version)
    sampling = SamplingParams(temperature=0, max_tokens=40, detokenize=False)
    visits, inputs = [], [{"prompt_token_ids": prompt} for prompt in prompts]
    for _ in range(2):
        outputs = llm.generate(inputs, sampling, use_tqdm=False)
        visits.append([list(output.outputs[0].token_ids) for output in outputs])
    metrics = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
    replaced = llm.collective_rpc(patched)
    result = {
        "patched": replaced,
        "responses": visits,
        "version": told,
        "accepted": metrics["vllm:spec_decode_num_accepted_tokens"],
    }
    if os.environ.get("HISTOSPEC_TEST_KILL") == "1":
        result["died"] = killed(llm, inputs, sampling)
    Path(path).write_text(json.dumps(result))
    while len(list(Path(path).parent.glob("result-*.json"))) < int(os.environ.get("VLLM_DP_SIZE", "1")):
        time.sleep(0.1)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    # Two workers on whatever cores there are, and nothing beyond loopback.
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the workers would compile into the same files, and read halves of them
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # of `patched`
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    main(sys.argv[1], json.loads(sys.argv[2]), *sys.argv[3:])
