"""Starts vLLM with the arguments that a trainer's own code makes; writes a file of JSON.

    python trainer_engine.py TRAINER MODEL PROMPTS(JSON) FILE

The trainer knows nothing of HistoSpec. Replaced is what needs a GPU: where the model computes, and what the trainer
adds to vLLM's workers to receive weights. `trainer`: its version. `responses`: a list of token ids for each prompt, of
each of two visits. `accepted`: drafted tokens that were accepted.
"""

import asyncio
import contextlib
import importlib.metadata
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

CPU = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 2048,
    "kv_cache_memory_bytes": 64 << 20, "disable_log_stats": False, "enable_sleep_mode": False, "load_format": "auto",
    "worker_extension_cls": "", "weight_transfer_config": None,
}  # fmt: skip


class Made(Exception):  # noqa: N818 - it ends the trainer's code where vLLM would start
    """The arguments that vLLM gets."""


def made(*args: Any, **kwargs: Any) -> Any:
    raise Made(args, kwargs)


def caught(call: Any) -> Any:
    """Returns what a trainer's code gives to `made`."""
    try:
        call()
    except Made as arguments:
        return arguments.args
    raise AssertionError("the trainer did not start vLLM")


def trl_colocate(model: str) -> Any:
    """TRL's trainer with vllm_mode="colocate", its default."""
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM
    from trl.generation import vllm_generation

    policy = AutoModelForCausalLM.from_pretrained(model)
    with mock.patch.object(vllm_generation, "LLM", made, create=True):
        _, arguments = caught(
            lambda: vllm_generation.VLLMGeneration(policy, Accelerator(cpu=True), None, mode="colocate")
        )
    return arguments


def trl_server(model: str) -> Any:
    """`trl vllm-serve`, which runs `vllm serve`."""
    from trl.scripts import vllm_serve

    command = vllm_serve.build_command(vllm_serve.ScriptArguments(model=model))
    return command_line(command[command.index("serve") + 1 :])


def openrlhf(model: str) -> Any:
    """OpenRLHF's actor for rollouts, with the arguments of its trainer."""
    import vllm
    from openrlhf.trainer.ray import vllm_engine

    given: list[Any] = []
    actor = vllm_engine.RolloutRayActor
    remote = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda **kwargs: given.append(kwargs)))
    group = mock.Mock(bundle_specs=[{"GPU": 1}])
    with (
        mock.patch.object(vllm_engine, "RolloutRayActor", remote),
        mock.patch.object(vllm_engine, "PlacementGroupSchedulingStrategy"),
    ):
        vllm_engine.create_vllm_engines(
            num_engines=1, tensor_parallel_size=1, pretrain=model, seed=0, full_determinism=False,
            enable_prefix_caching=True, enforce_eager=True, max_model_len=512, shared_pg=group,
            gpu_memory_utilization=0.5, logprobs_mode="processed_logprobs",
        )  # fmt: skip
    os.environ.setdefault("RAY_ADDRESS", "none")
    engine = mock.Mock(from_engine_args=made)
    with mock.patch.object(vllm, "AsyncLLMEngine", engine):
        (args,), _ = caught(lambda: asyncio.run(start_actor(actor, given[0])))
    return args


async def start_actor(actor: Any, arguments: dict[str, Any]) -> None:
    """Runs the code of a Ray actor's start in this process."""
    kind = actor.__ray_metadata__.modified_class
    await kind.__init__(kind.__new__(kind), **arguments)


def skyrl(model: str) -> Any:
    """SkyRL's inference servers."""
    from skyrl.backends.skyrl_train.inference_servers.utils import build_vllm_cli_args
    from skyrl.train.config import SkyRLTrainConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    config = SkyRLTrainConfig()
    config.trainer.policy.model.path = model
    return AsyncEngineArgs.from_cli_args(build_vllm_cli_args(config))


def prime_rl(model: str) -> Any:
    """prime-rl's inference server."""
    from prime_rl.configs.inference import InferenceConfig
    from prime_rl.inference.server import setup_vllm_env

    config = InferenceConfig(vllm={"model": model})
    setup_vllm_env(config)
    from prime_rl.inference.vllm.server import server

    with mock.patch("vllm.entrypoints.openai.api_server.run_server", made):
        (namespace,), _ = caught(lambda: server(config))
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs.from_cli_args(namespace)


def nemo_rl(model: str) -> Any:
    """NeMo-RL's synchronous worker for generation."""
    from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorkerImpl

    worker = object.__new__(VllmGenerationWorkerImpl)
    config = {
        "backend": "vllm", "model_name": model, "temperature": 1.0, "top_p": 1.0, "top_k": None, "max_new_tokens": 64,
        "stop_token_ids": None, "stop_strings": None, "vllm_kwargs": {},
        "vllm_cfg": {
            "async_engine": False, "precision": "bfloat16", "kv_cache_dtype": "auto", "tensor_parallel_size": 1,
            "logprobs_mode": "processed_logprobs", "pipeline_parallel_size": 1, "expert_parallel_size": 1,
            "gpu_memory_utilization": 0.6, "max_model_len": 512, "enforce_eager": True, "load_format": "dummy",
            "skip_tokenizer_init": True, "enable_prefix_caching": True,
        },
    }  # fmt: skip
    with mock.patch("nemo_rl.models.generation.vllm.vllm_worker._apply_vllm_patches"):
        worker._init_config(config, [0], 1.0, 0, None)
    worker._sparse_refit_receiver = None
    with mock.patch("vllm.LLM", made):
        _, arguments = caught(lambda: worker._load_model([0], 0))
    return arguments


def command_line(arguments: list[str]) -> Any:
    """What `vllm serve` makes of its command line."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    parsed.model = parsed.model_tag or parsed.model  # as the command does
    return AsyncEngineArgs.from_cli_args(parsed)


PACKAGES = {
    "trl_colocate": "trl", "trl_server": "trl", "openrlhf": "openrlhf", "skyrl": "skyrl", "prime_rl": "prime-rl",
    "nemo_rl": "nemo-rl",
}  # fmt: skip


def main(trainer: str, model: str, prompts: list[list[int]], path: str) -> None:
    arguments = globals()[trainer](model)
    from vllm import LLM, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    # vLLM's CPU build reads attributes of all that is imported; this module's `lib` takes any name, and so fails there.
    sys.modules.pop("llvmlite.binding.ffi", None)
    if isinstance(arguments, dict):
        engine = LLM(**arguments | CPU).llm_engine
    else:
        for name, value in CPU.items():
            setattr(arguments, name, value)
        engine = LLMEngine.from_engine_args(arguments)
    visits: list[Any] = []
    for _ in range(2):
        sampling = SamplingParams(temperature=0, max_tokens=40, detokenize=False, logprobs=0)
        for number, prompt in enumerate(prompts):
            engine.add_request(f"{len(visits)}-{number}", {"prompt_token_ids": prompt}, sampling)
        written: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            done = [output for output in engine.step() if output.finished]
            written |= {output.request_id: list(output.outputs[0].token_ids) for output in done}
        visits.append([[written[f"{len(visits)}-{number}"]] for number in range(len(prompts))])
    accepted = [m.value for m in engine.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens"]
    version = "by its sources"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version(PACKAGES[trainer])
    Path(path).write_text(json.dumps({"trainer": version, "responses": visits, "accepted": sum(accepted)}))
    engine.engine_core.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4])
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads may not end
