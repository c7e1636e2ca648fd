"""verl's own code around a tiny policy: its configuration, its vLLM server, its workers, on the CPU and in Ray.

verl wants GPUs only for training and to place its servers. So the tests start verl's server as an actor by themselves,
where verl would look for GPUs first; all that happens in it, and all that talks to it, is verl's.
"""

import asyncio
import os
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "frameworks" / "verl.md"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
NAMESPACE = "verl"
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """The share of one letter."""
    return solution_str.count(ground_truth) / max(1, len(solution_str))
'''

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


@pytest.fixture(scope="session")
def verl():
    """verl, or why it is not tested."""
    return pytest.importorskip("verl", reason="needs verl in the environment: make test-verl")


@pytest.fixture(scope="session")
def lines():
    """lines(heading) -> the overrides that the page gives under it."""
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S))

    def under(heading):
        import shlex

        blocks = re.findall(r"^```\n(.*?)^```", sections[heading], re.M | re.S)
        words = shlex.split(" ".join(blocks).replace("\\\n", " "))
        return [word for word in words if word.startswith("+")]

    return under


@pytest.fixture(scope="session")
def tiny_model(verl, tmp_path_factory):
    """Directory of a random causal LM whose tokens are letters, with a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    vocabulary = {letter: i for i, letter in enumerate(LETTERS)} | {"<pad>": 26, "<end>": 27}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", eos_token="<end>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=27, pad_token_id=26, initializer_range=0.3,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("tiny-model")
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def compose(tiny_model, tmp_path_factory):
    """compose(*overrides) -> verl's configuration of a PPO run of the tiny policy on a CPU."""
    from hydra import compose as compose_
    from hydra import initialize_config_module

    reward = tmp_path_factory.mktemp("reward") / "reward.py"
    reward.write_text(REWARD)
    rollout = "actor_rollout_ref.rollout"
    small = [
        f"actor_rollout_ref.model.path={tiny_model}",
        "+actor_rollout_ref.model.override_config={attn_implementation: eager}",
        f"{rollout}.name=vllm", f"{rollout}.tensor_model_parallel_size=1", f"{rollout}.dtype=float32",
        f"{rollout}.enforce_eager=true", f"{rollout}.load_format=auto", f"+{rollout}.enable_sleep_mode=false",
        f"{rollout}.free_cache_engine=false", f"{rollout}.prompt_length=32", f"{rollout}.response_length=60",
        f"{rollout}.max_model_len=256", f"{rollout}.max_num_seqs=16", f"{rollout}.agent.num_workers=1",
        f"{rollout}.disable_log_stats=false", f"{rollout}.n=2",
        f"+{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes={64 << 20}",
        f"reward.custom_reward_function.path={reward}", "reward.num_workers=1",
    ]  # fmt: skip

    def composed(*overrides):
        with initialize_config_module("verl.trainer.config", version_base=None):
            return compose_("ppo_trainer", overrides=[*small, *overrides])

    return composed


@pytest.fixture(scope="session")
def settings(lines):
    """All that the page tells to add to the command."""
    return lines("Drafts") + lines("Rewards, logprobs, epochs")


@pytest.fixture(scope="session")
def ray_cluster(verl):
    """Ray on this machine, whose workers see what the tests set before."""
    import ray

    environment = {"PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH")]))}
    ray.init(num_cpus=16, num_gpus=0, include_dashboard=False, runtime_env={"env_vars": environment})
    yield ray
    ray.shutdown()


class Run:
    """A run of verl between two updates of the policy: its server, and whatever manager the configuration names."""

    def __init__(self, ray, config):
        self.ray = ray
        self.config = config
        self.server = self._start()

    def _start(self):
        from verl.workers.rollout.replica import RolloutMode
        from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

        class Server(vLLMHttpServer):
            async def run_server(self, args):
                self.arguments = args
                await super().run_server(args)

            async def said(self):
                return self.arguments.speculative_config, self.arguments.scheduler_cls

            async def counter(self, name):
                from prometheus_client import REGISTRY

                samples = [s for m in REGISTRY.collect() for s in m.samples if s.name == f"vllm:{name}_total"]
                return sum(sample.value for sample in samples)

        environment = {name: value for name, value in os.environ.items() if name.startswith("HISTOSPEC_")}
        server = (
            self.ray.remote(Server)
            .options(max_concurrency=100, runtime_env={"env_vars": environment})
            .remote(
                config=self.config.actor_rollout_ref.rollout, model_config=self.config.actor_rollout_ref.model,
                rollout_mode=RolloutMode.STANDALONE, workers=[], replica_rank=0, node_rank=0, gpus_per_node=1,
                nnodes=1, cuda_visible_devices="",
            )
        )  # fmt: skip
        self.ray.get(server.launch_server.remote(), timeout=300)
        return server

    def client(self):
        from verl.workers.rollout.llm_server import LLMServerClient
        from verl.workers.rollout.router import get_router_handle

        return LLMServerClient(self.config, get_router_handle({"here": self.server}))


@pytest.fixture
def run(ray_cluster):
    return lambda config: Run(ray_cluster, config)
