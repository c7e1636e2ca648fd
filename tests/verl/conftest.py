"""verl's own code around a tiny policy: its configuration, its vLLM server, its workers, on the CPU and in Ray.

verl wants GPUs only for training and to place its servers. So the tests start verl's server as an actor by themselves,
where verl would look for GPUs first; all that happens in it, and all that talks to it, is verl's.
"""

import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from histospec.client import Response
from tests.support.servers import Server
from tests.support.waiting import eventually

PAGE = Path(__file__).parents[2] / "docs" / "frameworks" / "verl.md"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
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


class Run:
    """A run of verl between two updates of the policy: its server, its rewards, and the manager that it configures."""

    def __init__(self, ray: Any, config: Any) -> None:
        from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
        from verl.workers.rollout.llm_server import LLMServerClient
        from verl.workers.rollout.router import get_router_handle

        self.ray = ray
        self.config = config
        self._rewards = ray.remote(RewardLoopWorker).remote(config, None)
        self.server = self._start()
        self._client = LLMServerClient(config, get_router_handle({"here": self.server}))

    def _start(self) -> Any:
        from verl.workers.rollout.replica import RolloutMode
        from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

        class Server(vLLMHttpServer):  # type: ignore[misc]
            async def run_server(self, args: Any) -> None:
                self.arguments = args
                await super().run_server(args)

            async def engine_arguments(self) -> Any:
                return vars(self.arguments)

        server = self.ray.remote(Server).options(max_concurrency=100).remote(
            config=self.config.actor_rollout_ref.rollout, model_config=self.config.actor_rollout_ref.model,
            rollout_mode=RolloutMode.STANDALONE, workers=[], replica_rank=0, node_rank=0, gpus_per_node=1, nnodes=1,
            cuda_visible_devices="",
        )  # fmt: skip
        self.ray.get(server.launch_server.remote(), timeout=SECONDS)
        return server

    def updated(self, step: int) -> None:
        """What verl's trainer tells the server after it has brought new weights."""
        self.ray.get(self.server.set_global_steps.remote(step))

    def manager(self, *overrides: str) -> Any:
        """What verl's own loader finds under the name in the configuration, made as its trainers make it."""
        from verl.utils.import_utils import load_class_from_fqn

        config = self.config.copy()
        config.merge_with_dotlist(list(overrides))
        manager = load_class_from_fqn(config.actor_rollout_ref.rollout.agent.agent_loop_manager_class)
        return manager.create(
            config=config, llm_client=self._client, teacher_client=None, reward_loop_worker_handles=[self._rewards]
        )


@pytest.fixture(scope="module")
def run(verl: Any, compose: Callable[..., Any], settings: list[str], shared_server: Server) -> Iterator[Any]:
    """A run with all that the page tells, against a draft server of this module."""
    import ray

    told = {"HISTOSPEC_ENDPOINT": shared_server.endpoint, "HISTOSPEC_NAMESPACE": NAMESPACE}
    # The tests are about what is drafted and kept, not about how fast a busy machine answers or computes.
    told |= {"HISTOSPEC_DEADLINE": "5", "HISTOSPEC_VERIFY_COST": "0.05"}
    ray.init(num_cpus=32, num_gpus=0, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": told})
    yield Run(ray, compose(*settings))
    ray.shutdown()


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
