"""Steps a vLLM engine in this process, to time only decoding steps of full batches."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import benchmarks.vllm.environment  # noqa: F401 - first

# isort: split
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.sampling_params import RequestOutputKind

from examples.tiny_rl.rollout import Counts, StepCounter, as_prompt


@dataclass(frozen=True)
class Window:
    """Consecutive decoding steps."""

    seconds: float
    batch: int
    counts: Counts

    @property
    def step(self) -> float:
        """Seconds per step."""
        return self.seconds / self.counts.engine_steps

    @property
    def drafted(self) -> float:
        """Verified tokens per step and sequence."""
        return self.counts.drafted / self.counts.steps

    @property
    def gained(self) -> float:
        """Tokens per step and sequence."""
        return 1 + self.counts.accepted / self.counts.steps


class Stepper:
    """Runs batches of requests that do not stop."""

    def __init__(
        self,
        folder: Path,
        context: int,
        room: int,
        batch: int,
        options: dict[str, Any],
        watch: Callable[[LLM], None] = lambda llm: None,
    ) -> None:
        """Makes the engine.

        Args:
            context: tokens of a prompt.
            room: most tokens of a response.
            batch: most requests.
            options: vLLM's arguments.
            watch: gets the engine before its steps are counted, to time them without the counting.
        """
        self.llm = LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            max_model_len=context + room,
            max_num_seqs=batch,
            use_tqdm_on_load=False,
            **options,
        )
        watch(self.llm)
        self._each, self._room, self._running, self._started = context + room, room, 0, 0
        self._counter = StepCounter(self.llm)

    @property
    def config(self) -> VllmConfig:
        """vLLM's final configuration."""
        return self.llm.llm_engine.vllm_config

    @property
    def fitting(self) -> int:
        """How many requests fit into the KV cache together."""
        cache = self.config.cache_config
        assert cache.num_gpu_blocks is not None  # it has started
        return int((cache.num_gpu_blocks - 1) // -(-self._each // cache.block_size))  # vLLM keeps one block empty

    def settings(self) -> dict[str, Any]:
        """Returns the parts of vLLM's configuration that affect the time of a step."""
        graphs = self.config.compilation_config
        return {
            "async_scheduling": bool(self.config.scheduler_config.async_scheduling),
            "model_runner": "V2" if getattr(self.config, "use_v2_model_runner", False) else "V1",
            "graph_mode": str(graphs.cudagraph_mode),
            "graph_sizes": list(graphs.cudagraph_capture_sizes or ()),
            "fitting": self.fitting,
        }

    def sampling(self, epoch: int, tokens: int) -> SamplingParams:
        """Returns sampling parameters at temperature 1, as in RL, that return whole responses as LLM.generate does."""
        return SamplingParams(
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"histospec": {"epoch": epoch}},
        )

    def start(self, prompts: Sequence[list[int]], epoch: int = 1) -> None:
        """Adds the requests and lets vLLM read their prompts; known prompts come from the prefix cache.

        Raises RuntimeError if a request ends before all have begun.
        """
        engine, self._running = self.llm.llm_engine, len(prompts)
        sampling = self.sampling(epoch, self._room)
        for i, prompt in enumerate(prompts):
            engine.add_request(str(self._started + i), as_prompt(prompt), sampling)
        before = self._counter.counts
        while (self._counter.counts - before).steps < self._running:
            before = self._counter.counts
            engine.step()
            if engine.get_num_unfinished_requests() < self._running:
                raise RuntimeError(f"responses of {self._room} tokens end before {self._running} prompts are read")

    def window(self, steps: int) -> Window:
        """Times `steps` steps. Raises RuntimeError if one of them did not decode every request."""
        before, start = self._counter.counts, time.perf_counter()
        while (done := self._counter.counts - before).engine_steps < steps:
            self.llm.llm_engine.step()
        seconds = time.perf_counter() - start
        if done.steps != done.engine_steps * self._running:
            raise RuntimeError(
                f"{done.steps} request steps in {done.engine_steps} steps of {self._running} requests: "
                "some ended or were preempted"
            )
        return Window(seconds, self._running, done)

    def stop(self) -> None:
        """Aborts the requests."""
        ids = [str(self._started + i) for i in range(self._running)]
        self.llm.llm_engine.abort_request(ids)
        self._started += self._running
        while self.llm.llm_engine.has_unfinished_requests():
            self.llm.llm_engine.step()


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)
