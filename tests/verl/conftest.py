"""Fixtures of verl with a tiny policy: its configuration, its vLLM server, its workers, on the CPU and in Ray.

verl needs GPUs only for training and for placing its servers. So the tests start verl's server as an actor themselves.
The code of the server, and all code that calls it, is verl's.
"""

import argparse
import asyncio
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from histospec.client import Response
from tests.support.servers import Server
from tests.support.verl_batches import LETTERS
from tests.support.waiting import eventually

PAGE = Path(__file__).parents[2] / "docs" / "frameworks" / "verl.md"
TINY: dict[str, Any] = {
    "vocab_size": 28, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False, "bos_token_id": None,
    "eos_token_id": 27, "pad_token_id": 26, "initializer_range": 0.3,
}  # fmt: skip
NAMESPACE = "verl"
SECONDS = 400
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """How often a letter comes."""
    return float(solution_str.count(ground_truth))
'''

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


@pytest.fixture(scope="session")
def verl() -> Any:
    """verl, or why it is not tested."""
    return pytest.importorskip("verl", reason="needs verl in the environment: make test-verl")


@pytest.fixture(scope="session")
def lines() -> Callable[..., list[str]]:
    """lines(heading) -> the overrides that the page gives under it, and what its files hold."""
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S))

    def under(heading: str, kind: str = "") -> Any:
        blocks = [
            body for of, body in re.findall(r"^```(\w*)\n(.*?)^```", sections[heading], re.M | re.S) if of == kind
        ]
        if kind:
            return blocks
        return [word for word in shlex.split(" ".join(blocks).replace("\\\n", " ")) if "=" in word]

    return under


@pytest.fixture(scope="session")
def tiny_model(verl: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a random causal LM whose tokens are letters, with a chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("tiny-model")
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(path)
    save_tokenizer(path)
    return str(path)


@pytest.fixture(scope="session")
def mtp_model(verl: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a random MiMo: a Qwen2 with one MTP layer, which is random, too.

    Its configuration calls it a Llama, because verl expects Qwen's chat template of what is called a Qwen.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("mtp-model")
    config = Qwen2Config(**TINY)
    Qwen2ForCausalLM(config).save_pretrained(path)
    save_tokenizer(path)
    width = config.hidden_size
    layer = {name: 0.3 * torch.randn_like(weight) for name, weight in Qwen2DecoderLayer(config, 0).named_parameters()}
    layer |= {f"{norm}_layernorm.weight": torch.ones(width) for norm in ("token", "hidden", "final")}
    layer["input_proj.weight"] = 0.3 * torch.randn(width, 2 * width)
    weights = load_file(path / "model.safetensors")
    save_file(weights | {f"model.mtp_layers.0.{name}": weight.detach().contiguous() for name, weight in layer.items()},
              path / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    told = json.loads((path / "config.json").read_text())
    told |= {"architectures": ["MiMoForCausalLM"], "model_type": "llama", "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(told))
    return str(path)


def save_tokenizer(path: Path) -> None:
    """Writes a tokenizer of letters, with a chat template, beside a model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: i for i, letter in enumerate(LETTERS)} | {"<pad>": 26, "<end>": 27}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", eos_token="<end>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(path)


@pytest.fixture(scope="session")
def compose(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
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
        f"{rollout}.ignore_eos=true", f"{rollout}.n=2",
        f"+{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes={64 << 20}",
        f"reward.custom_reward_function.path={reward}", "reward.num_workers=1",
    ]  # fmt: skip

    def composed(*overrides: str) -> Any:
        with initialize_config_module("verl.trainer.config", version_base=None):
            return compose_("ppo_trainer", overrides=[*small, *overrides])

    return composed


@pytest.fixture(scope="session")
def settings(lines: Callable[..., list[str]]) -> list[str]:
    """All that the page tells to add to the command."""
    return lines("Drafts") + lines("Rewards, logprobs, epochs")


def server_class(starts: bool) -> Any:
    """verl's vLLM server, which keeps what it starts vLLM with; without `starts` it does no more than that."""
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    class Server(vLLMHttpServer):  # type: ignore[misc]
        async def run_server(self, args: Any) -> None:
            self.arguments = args
            if starts:
                await super().run_server(args)

        async def engine_arguments(self) -> Any:
            return vars(self.arguments)

    return Server


def server_settings(config: Any) -> dict[str, Any]:
    """What verl makes a server of, for a server by itself."""
    from verl.workers.rollout.replica import RolloutMode

    rollout = config.actor_rollout_ref
    return {
        "config": rollout.rollout, "model_config": rollout.model, "rollout_mode": RolloutMode.STANDALONE,
        "workers": [], "replica_rank": 0, "node_rank": 0, "gpus_per_node": 1, "nnodes": 1, "cuda_visible_devices": "",
    }  # fmt: skip


class Run:
    """A run of verl between two updates of the policy: its server, its rewards, and the manager that it configures."""

    def __init__(self, ray: Any, config: Any) -> None:
        from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
        from verl.workers.rollout.llm_server import LLMServerClient
        from verl.workers.rollout.router import get_router_handle

        self.ray = ray
        self.config = config
        self.rewards = [ray.remote(RewardLoopWorker).remote(config, None)]
        server = ray.remote(server_class(starts=True)).options(max_concurrency=100)
        self.server = server.remote(**server_settings(config))
        ray.get(self.server.launch_server.remote(), timeout=SECONDS)
        self._client = LLMServerClient(config, get_router_handle({"here": self.server}))

    def updated(self, step: int) -> None:
        """What verl's trainer tells the server after it has brought new weights."""
        self.ray.get(self.server.set_global_steps.remote(step))

    def manager(self, *overrides: str) -> Any:
        config = self.config.copy()
        config.merge_with_dotlist(list(overrides))
        return self.manager_of(config)

    def manager_of(self, config: Any) -> Any:
        """What verl's own loader finds under the name in the configuration, made as its trainers make it."""
        from verl.utils.import_utils import load_class_from_fqn

        manager = load_class_from_fqn(config.actor_rollout_ref.rollout.agent.agent_loop_manager_class)
        return manager.create(
            config=config, llm_client=self._client, teacher_client=None, reward_loop_worker_handles=self.rewards
        )


@pytest.fixture(scope="module")
def variables() -> dict[str, str]:
    """Further variables of Ray's workers; a module overrides it."""
    return {}


@pytest.fixture(scope="module")
def ray(verl: Any, shared_server: Server, variables: dict[str, str]) -> Iterator[Any]:
    """Ray, whose workers talk to a draft server of this module. The trainer, which is this process, finds it, too."""
    import ray

    told = {"HISTOSPEC_ENDPOINT": shared_server.endpoint, "HISTOSPEC_NAMESPACE": NAMESPACE}
    # The tests are about what is drafted and kept, not about how fast a busy machine answers or computes.
    told |= {"HISTOSPEC_DEADLINE": "5", "HISTOSPEC_VERIFY_COST": "0.05", **variables}
    ray.init(num_cpus=32, num_gpus=0, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": told})
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HISTOSPEC_ENDPOINT", "HISTOSPEC_NAMESPACE"):
            patch.setenv(name, told[name])
        yield ray
    ray.shutdown()


@pytest.fixture
def arguments(ray: Any, compose: Callable[..., Any]) -> Iterator[Callable[..., argparse.Namespace]]:
    """arguments(*overrides) -> the arguments of `vllm serve` that verl's server makes of its configuration."""
    environment = dict(os.environ)

    def arguments_of(*overrides: str) -> Any:
        server = server_class(starts=False)(**server_settings(compose(*overrides)))
        asyncio.run(server.launch_server())
        return server.arguments

    yield arguments_of
    os.environ.clear()  # verl's server sets variables
    os.environ.update(environment)


@pytest.fixture(scope="module")
def start_run(ray: Any, compose: Callable[..., Any]) -> Callable[..., Run]:
    return lambda *overrides: Run(ray, compose(*overrides))


@pytest.fixture(scope="module")
def run(start_run: Callable[..., Run], settings: list[str]) -> Run:
    """A run with all that the page tells."""
    return start_run(*settings)


@pytest.fixture
def loop(
    compose: Callable[..., Any], settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """loop(run, train, validation, epochs, *overrides) -> verl's trainer after its loop, and what it logged per step.

    It samples with the server of the run.
    """
    import transfer_queue as tq

    from tests.support import verl_loop

    file = tmp_path / "logged.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(file))

    def fitted(run: Run, train: Any, validation: Any, epochs: int, *overrides: str) -> Any:
        config = compose(*settings, *verl_loop.settings(tmp_path, train, validation, epochs), *overrides)
        tq.init(config.transfer_queue)
        trainer = verl_loop.Loop(config, run.updated, run.rewards)
        trainer.fit(run.manager_of(config))
        return trainer, verl_loop.logged(file)

    yield fitted
    tq.close()


@pytest.fixture(scope="module")
def history(shared_server: Server) -> Iterator[Callable[..., list[Response]]]:
    """history(messages, count) -> the responses to a problem, once the server has so many."""
    from histospec.client import DraftClient
    from histospec.client.verl.worker import problem_of

    with DraftClient(shared_server.endpoint, NAMESPACE) as client:

        def responses(messages: list[dict[str, str]], count: int) -> list[Response]:
            prompt = [LETTERS.index(letter) for message in messages for letter in message["content"]]
            found: list[Response] = []

            def there() -> bool:
                found[:] = client.history(prompt, problem=problem_of(messages))
                return len(found) >= count

            eventually(there, f"the history never had {count} responses")
            return found

        yield responses
