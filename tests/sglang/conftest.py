"""Fixtures: SGLang engines with a tiny trained policy on the CPU, with and without drafts.

The scheduler, the NGRAM worker, the radix cache and the verification are SGLang's own. `testbed` takes the place of
compiled kernels. An engine starts in half a minute, so tests of a module share them.
"""

import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from histospec.client import DraftClient
from tests.support import tiny_policy
from tests.support.servers import Server
from tests.support.tiny_policy import VOCABULARY

ROOT = Path(__file__).parents[2]
TESTBED = Path(__file__).parent / "testbed"
NAMESPACE = "sglang"
PLACES = 9  # draft tokens of SGLang: the last token, and 8 of a draft
ARGUMENTS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "attention_backend": "torch_native", "sampling_backend": "pytorch",
    "disable_cuda_graph": True, "skip_server_warmup": True, "log_level": "info", "context_length": 512,
    "max_total_tokens": 8192, "max_running_requests": 16, "mem_fraction_static": 0.2, "random_seed": 0,
    "sleep_on_idle": True, "disable_overlap_schedule": True,
}  # fmt: skip
NGRAM = {
    "speculative_algorithm": "NGRAM",
    "speculative_num_draft_tokens": PLACES,
    "speculative_ngram_max_bfs_breadth": 1,
}


@pytest.fixture(scope="session", autouse=True)
def sglang() -> None:
    """Says why SGLang is not tested where it is not."""
    if importlib.util.find_spec("sglang") is None:  # the engines import it, with the test bed
        pytest.skip("needs SGLang in the environment: make test-sglang")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of the policy."""
    return tiny_policy.make(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Prompts of different lengths, no two alike."""
    return [[(7 * i + j * j) % VOCABULARY for j in range(3 + i)] for i in range(8)]


class Engine:
    """An engine in a process of its own."""

    def __init__(self, model: str, endpoint: str | None, environment: dict[str, str], **arguments: Any) -> None:
        drafts = {} if endpoint is None else {"HISTOSPEC_ENDPOINT": endpoint, "HISTOSPEC_NAMESPACE": NAMESPACE}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HISTOSPEC_")}
        path = os.pathsep.join((str(TESTBED), str(ROOT)))
        own = {
            "SGLANG_USE_CPU_ENGINE": "1", "SGLANG_NATIVE_MOVE_KV_CACHE": "1", "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1", "HISTOSPEC_DEADLINE": "5", "TRITON_INTERPRET": "1",
        }  # fmt: skip
        self.log: list[str] = []
        words = json.dumps(ARGUMENTS | {"model_path": model} | arguments)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.sglang.engine_process", words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=kept | own | drafts | environment, start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._answer()

    def _read(self) -> None:
        assert self._process.stderr is not None
        self.log.extend(line.rstrip() for line in self._process.stderr)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError("the engine ended:\n" + "\n".join(self.log[-60:]))
        return json.loads(line)

    def do(self, what: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what} | arguments) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def start(self, prompts: Sequence[Sequence[int]], rid: str | None = None, **sampling: Any) -> None:
        """Hands the prompts to the engine. `rid`: their ids are this text and a number."""
        parameters = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True} | sampling
        requests = [{"input_ids": list(prompt), "sampling_params": parameters} for prompt in prompts]
        if rid is not None:
            requests = [request | {"rid": f"{rid}{number}"} for number, request in enumerate(requests)]
        self.do("start", requests=requests)

    def wait(self) -> list[Any]:
        """Returns SGLang's answers, one per prompt; with n > 1 a list each."""
        answers: list[Any] = self.do("wait")
        return answers

    def generate(self, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[Any]:
        """Returns the token ids of each prompt's response; with n > 1 of its responses."""
        self.start(prompts, **sampling)
        return [
            answer["output_ids"] if isinstance(answer, dict) else [one["output_ids"] for one in answer]
            for answer in self.wait()
        ]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()


@pytest.fixture(scope="module")
def start_engine(tiny_model: str) -> Iterator[Callable[..., Engine]]:
    """start_engine(endpoint=None, environment={}, **arguments of SGLang) -> Engine that ends with the module."""
    with ExitStack() as stack:

        def start(endpoint: str | None = None, environment: dict[str, str] | None = None, **arguments: Any) -> Engine:
            engine = Engine(tiny_model, endpoint, environment or {}, **arguments)
            stack.callback(engine.close)
            return engine

        yield start


@pytest.fixture(scope="module")
def plain(start_engine: Callable[..., Engine]) -> Engine:
    """An engine without speculation."""
    return start_engine()


@pytest.fixture(scope="module")
def drafting(start_engine: Callable[..., Engine], shared_server: Server) -> Engine:
    """An engine with drafts of the module's server."""
    return start_engine(shared_server.endpoint, **NGRAM)


@pytest.fixture
def client(shared_server: Server) -> Iterator[DraftClient]:
    """A client in the namespace of the engines."""
    with DraftClient(shared_server.endpoint, namespace=NAMESPACE, deadline=5) as client:
        yield client
