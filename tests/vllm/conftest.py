"""Fixtures: a tiny trained policy, and vLLM engines with it, with and without drafts.

Engines run in the tests' own process unless a test needs another: they start in 2 s instead of 15, once for each
configuration, and tests can inspect the scheduler. The first test that needs an engine imports vLLM, not the collection
of tests.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from histospec.client import DraftClient
from tests.support import asynchronous, interpreter, tiny_policy
from tests.support.engines import Engines
from tests.support.tiny_policy import VOCABULARY

DRAFTS = {
    "speculative_config": {
        "method": "custom_class",
        "model": "histospec.client.vllm.HistoSpecProposer",
        "num_speculative_tokens": 16,
    },
    "scheduler_cls": "histospec.client.vllm.HistoSpecScheduler",
}
NOWHERE = "127.0.0.1:9"  # the discard port: nothing listens there

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; with more a step takes 100 times longer
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


RUNNER = "v1" if os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "") in ("", "0") else "v2"

ASYNCHRONOUS = RUNNER == "v2" and os.environ.get("HISTOSPEC_TEST_ASYNC") == "1"
"""Whether engines with drafts schedule asynchronously, unless a test says otherwise."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out the tests of vLLM's other model runner."""
    other = {"v1": "v2", "v2": "v1"}[RUNNER]
    for item in items:
        if item.get_closest_marker(other) is not None:
            item.add_marker(pytest.mark.skip(f"vLLM's model runner is {RUNNER.upper()}: `make test-v2` runs V2"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a causal LM of two layers, trained for seconds to follow the last two tokens of its text."""
    pytest.importorskip("vllm", reason="needs a vLLM build in the environment")
    return tiny_policy.make(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a mixture of experts of two layers, with random weights: two of four experts for each token."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from vllm.distributed.parallel_state import destroy_model_parallel

    destroy_model_parallel()  # the groups of models before, which had no experts
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, moe_intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=32, num_experts=4,
        num_experts_per_tok=2, max_position_embeddings=512, initializer_range=0.5, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    path = str(tmp_path_factory.mktemp("mixture"))
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


class Rollouts:
    """An engine and its counters. close: ends it, for good or for this test."""

    def __init__(self, llm: Any, close: Callable[[], None]) -> None:
        self.llm = llm
        self.close = close
        self.verified = 0  # pairs of a request and a step that gave it tokens
        core = getattr(llm.llm_engine.engine_core, "engine_core", None)  # in the tests' process only
        self.ids: list[str] = []
        self.scheduler: Any = core.scheduler if core is not None else None
        if self.scheduler is not None:
            self._count_steps()

    def _count_steps(self) -> None:
        update = self.scheduler.update_from_output

        def counted(scheduler_output: Any, model_runner_output: Any) -> Any:
            self.verified += sum(map(bool, model_runner_output.sampled_token_ids))
            return update(scheduler_output, model_runner_output)

        self.scheduler.update_from_output = counted

    def start(self, prompts: list[list[int]], extra_args: Any = None, lora: Any = None, **sampling: Any) -> None:
        """Hands the prompts to the engine; `finish` runs them. lora: an adapter for each, or None."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = {"temperature": 0, "max_tokens": 40, "detokenize": False} | sampling
        sampling["output_kind"] = RequestOutputKind.FINAL_ONLY
        extra = extra_args if isinstance(extra_args, list) else [extra_args] * len(prompts)
        self.ids = []
        for prompt, arguments, adapter in zip(prompts, extra, lora or [None] * len(prompts), strict=True):
            self.ids.append(f"request-{len(self.ids)}")
            parameters = SamplingParams(**sampling, extra_args=arguments)
            request = self.ids[-1], {"prompt_token_ids": prompt}, parameters
            self.llm.llm_engine.add_request(*request, lora_request=adapter)

    def step(self, times: int = 1) -> list[Any]:
        """Runs the engine a few steps; returns the outputs that finished."""
        return [output for _ in range(times) for output in self.llm.llm_engine.step() if output.finished]

    def outputs(self) -> list[Any]:
        """Runs to the end; returns vLLM's output for each prompt, None for those aborted."""
        done: dict[str, Any] = {}
        while self.llm.llm_engine.has_unfinished_requests():
            done |= {output.request_id: output for output in self.step()}
        return [done.get(name) for name in self.ids]

    def finish(self) -> list[Any]:
        """Runs to the end; returns a list of responses (token ids) a prompt, in the order of the prompts."""
        return [output and [list(c.token_ids) for c in output.outputs] for output in self.outputs()]

    def generate(self, prompts: list[list[int]], **sampling: Any) -> list[Any]:
        self.start(prompts, **sampling)
        return self.finish()

    def counter(self, name: str) -> float:
        """A counter of vLLM's, such as spec_decode_num_accepted_tokens."""
        return next((m.value for m in self.llm.get_metrics() if m.name == f"vllm:{name}"), 0)


@pytest.fixture(scope="session")
def start_engine(tiny_model: str) -> Iterator[Callable[..., Any]]:
    """start_engine(stack, ...) -> Rollouts on an engine that closes with the stack; arguments as those of `engine`."""
    shared = Engines()
    if RUNNER == "v2":
        interpreter.repair()

    def start(
        stack: contextlib.ExitStack,
        endpoint: str | None = None,
        namespace: str = "",
        in_process: bool = True,
        fresh: bool = False,
        **arguments: Any,
    ) -> Any:
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        environment.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0" if in_process else "1")
        if endpoint is not None:
            environment.setenv("HISTOSPEC_ENDPOINT", endpoint)
            environment.setenv("HISTOSPEC_NAMESPACE", namespace)
            arguments = DRAFTS | ({"async_scheduling": True} if ASYNCHRONOUS else {}) | arguments
        defaults = {
            "model": tiny_model, "skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True,
            "max_model_len": 512, "max_num_seqs": 16, "kv_cache_memory_bytes": 64 << 20, "disable_log_stats": False,
            "seed": 0,
        }  # fmt: skip
        arguments = defaults | arguments
        if arguments.get("async_scheduling"):
            asynchronous.keep_as_set()
        closing = contextlib.ExitStack()
        stack.callback(closing.close)
        llm = (shared.borrow if in_process and not fresh else shared.start)(**arguments)
        if in_process:
            closing.callback(shared.give_back, llm, **arguments)
        else:
            closing.callback(llm.llm_engine.engine_core.shutdown)
        if in_process and endpoint is not None and arguments.get("async_scheduling"):
            asynchronous.speculator_of(llm).reconnect()  # the engine may have served another test
        return Rollouts(llm, closing.close)

    yield start
    shared.close()


@contextlib.contextmanager
def _engines(start_engine: Callable[..., Any]) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        # The tests are about what is drafted, not about how fast a busy machine answers or computes.
        environment.setenv("HISTOSPEC_DEADLINE", "5")
        environment.setenv("HISTOSPEC_VERIFY_COST", "0.05")
        yield functools.partial(start_engine, stack)


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    """What a test writes is its own, in a server that others use."""
    return str(request.node.name)


@pytest.fixture
def engine(start_engine: Callable[..., Any], namespace: str) -> Iterator[Callable[..., Any]]:
    """engine(endpoint) -> Rollouts, as if its engine had just started; without an endpoint no drafts.

    fresh: it really has. in_process: not in a process of its own. Further arguments are vLLM's.
    """
    with _engines(start_engine) as start:
        yield functools.partial(start, namespace=namespace)


@pytest.fixture(scope="session")
def expected(start_engine: Callable[..., Any], prompts: list[list[int]]) -> list[list[list[int]]]:
    """What the engine writes to `prompts` without drafts."""
    with _engines(start_engine) as start:
        written: list[list[list[int]]] = start().generate(prompts)
        return written


@pytest.fixture
def make_client(namespace: str) -> Iterator[Callable[[str], DraftClient]]:
    """make_client(endpoint) -> DraftClient in the namespace of the test's engines, shut down at the end."""
    from histospec.client import DraftClient

    with contextlib.ExitStack() as stack:
        yield lambda endpoint: stack.enter_context(DraftClient(endpoint, namespace=namespace))


@pytest.fixture
def drafts() -> dict[str, Any]:
    """vLLM's arguments for drafts."""
    return DRAFTS


@pytest.fixture(scope="session")
def drafter(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """drafter(method, tokens) -> `speculative_config` of one of vLLM's own drafters, trained for `tiny_model`.

    The policy itself has the layer that `mtp` needs in `drafter("mtp")["model"]` alone: that is the model to serve.
    """
    from tests.support import model_drafters

    folder = tmp_path_factory.mktemp("drafters")

    @functools.cache
    def trained(method: str) -> str:
        accuracy = model_drafters.make(method, tiny_model, written(), folder / method)
        assert accuracy > 8 / VOCABULARY, method  # or every test with it says little
        return str(folder / method)

    @functools.cache
    def written() -> Any:
        return model_drafters.written(tiny_model, responses=384, length=40)

    def config(method: str, tokens: int = 16) -> dict[str, Any]:
        model = {} if method in ("ngram", "suffix") else {"model": trained(method)}
        return {"method": method, "num_speculative_tokens": tokens} | model

    return config


@pytest.fixture
def nowhere() -> str:
    """An endpoint where nothing listens."""
    return NOWHERE


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Prompts of different lengths, no two alike."""
    return [[(7 * i + j * j) % VOCABULARY for j in range(3 + i)] for i in range(12)]
