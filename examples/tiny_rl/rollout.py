"""Rollouts: a vLLM engine, with or without drafts, and an exact count of its steps."""

import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from transformers import LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.outputs import ModelRunnerOutput

from examples.tiny_rl.task import END_ID, LONGEST, VOCABULARY

DRAFTED = 16
"""The most tokens of a draft."""

WARMED_UP = 256
"""The most tokens of a step that an engine is warmed up for."""

DRAFTS: dict[str, Any] = {
    "speculative_config": {
        "method": "custom_class",
        "model": "histospec.client.vllm.HistoSpecProposer",
        "num_speculative_tokens": DRAFTED,
    },
    "scheduler_cls": "histospec.client.vllm.HistoSpecScheduler",
}
"""Everything that a worker needs to draft, besides HISTOSPEC_ENDPOINT and HISTOSPEC_NAMESPACE in its environment."""


def draft_model(folder: Path, tokens: int) -> dict[str, Any]:
    """Returns arguments of vllm.LLM for drafts of up to `tokens` tokens by the model in a transformers folder.

    With these alone, vLLM drafts with this model. As `DRAFTS | draft_model(...)`, HistoSpec chooses between its drafts
    and the server's.
    """
    speculative = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": tokens}
    return {"speculative_config": speculative, "async_scheduling": False}


def as_prompt(tokens: list[int]) -> TokensPrompt:
    """Returns a prompt of tokens in vLLM's form."""
    return TokensPrompt(prompt_token_ids=tokens)


@dataclass(frozen=True)
class Counts:
    """Counts of an engine's work."""

    steps: int = 0
    """Request steps: forward passes that gave a request at least one token, summed over the requests."""
    engine_steps: int = 0
    """Forward passes of the whole batch."""
    drafted: int = 0
    """Draft tokens that vLLM verified."""
    accepted: int = 0
    """Draft tokens that vLLM accepted."""

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Rollouts:
    """The responses of one pass over the prompts, and their cost."""

    responses: list[list[int]]
    """Token ids, the end token included; `samples` responses for each prompt, in the order of the prompts."""
    counts: Counts
    seconds: float
    cpu_seconds: float
    """CPU time of this process; other programs do not count."""

    @property
    def tokens(self) -> int:
        """Generated tokens, exactly as cut by vLLM."""
        return sum(map(len, self.responses))

    @property
    def tokens_per_step(self) -> float:
        """Generated tokens per request step; exactly 1 without drafts."""
        return self.tokens / self.counts.steps

    @property
    def acceptance(self) -> float:
        """Share of the verified draft tokens that vLLM accepted; 0 if nothing was drafted."""
        return self.counts.accepted / self.counts.drafted if self.counts.drafted else 0.0


class StepCounter:
    """Counts the work of an in-process engine, by wrapping a method of its scheduler.

    vLLM's own metrics leave out the steps whose draft was empty, which would make the tokens per step too high.

    Raises TypeError if the engine runs in another process.
    """

    def __init__(self, llm: LLM) -> None:
        client = llm.llm_engine.engine_core
        if not isinstance(client, InprocClient):
            raise TypeError(f"steps of a {type(client).__name__} cannot be counted: VLLM_ENABLE_V1_MULTIPROCESSING=0")
        scheduler = client.engine_core.scheduler
        update = scheduler.update_from_output
        self.counts = Counts()

        def counted(
            scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
        ) -> dict[int, EngineCoreOutputs]:
            drafts = scheduler_output.scheduled_spec_decode_tokens
            sampled = model_runner_output.sampled_token_ids
            gained = {  # a row is empty while the engine still reads its prompt
                request: len(sampled[row])
                for request, row in model_runner_output.req_id_to_index.items()
                if sampled and sampled[row]
            }
            answers: dict[int, EngineCoreOutputs] = update(scheduler_output, model_runner_output)
            # Under asynchronous scheduling, places that no draft has filled.
            unfilled = getattr(scheduler_output, "num_invalid_spec_tokens", None) or {}
            self.counts += Counts(
                steps=len(gained),
                engine_steps=int(scheduler_output.total_num_scheduled_tokens > 0),
                drafted=sum(len(drafts.get(request, ())) - unfilled.get(request, 0) for request in gained),
                accepted=sum(gained.values()) - len(gained),
            )
            return answers

        scheduler.update_from_output = counted


def responding(epoch: int | None, **options: Any) -> SamplingParams:
    """Returns the sampling parameters of a response. `epoch`: see `RolloutEngine.generate`; `options`: for vLLM."""
    return SamplingParams(
        max_tokens=LONGEST,
        stop_token_ids=[END_ID],
        detokenize=False,
        extra_args={"histospec": False if epoch is None else {"epoch": epoch}},
        **options,
    )


class RolloutEngine:
    """vLLM with the policy in `model_dir`, a transformers folder, in this process. Configured for a small CPU policy.

    `options` add to the arguments of vllm.LLM, or replace them; DRAFTS turns drafting on.
    """

    def __init__(self, model_dir: Path, concurrency: int, options: dict[str, Any]) -> None:
        settings: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 512,
            "max_num_seqs": concurrency,
            "max_num_batched_tokens": 4096,
            "kv_cache_memory_bytes": 256 << 20,
            "use_tqdm_on_load": False,
        }
        self._concurrency = concurrency
        self.llm = LLM(model=str(model_dir), **settings | options)
        self._counter = StepCounter(self.llm)

    @property
    def counts(self) -> Counts:
        """The engine's counts since it started."""
        return self._counter.counts

    def push(self, policy: LlamaForCausalLM) -> None:
        """Loads the weights of `policy` and clears the caches of the old ones."""
        weights = [(name, tensor.detach()) for name, tensor in policy.state_dict().items()]
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        self.llm.reset_prefix_cache()

    def warm_up(self) -> None:
        """Runs short requests that leave no trace, so that no epoch pays for first calls.

        On a CPU, the first step with a number of tokens compiles kernels for it, which takes longer than the step.
        """
        vocabulary = len(VOCABULARY)
        for tokens in range(1, min(self._concurrency * (1 + DRAFTED), WARMED_UP) + 1):
            prompt = [tokens % vocabulary, tokens // vocabulary, *[END_ID] * (tokens - 2)]  # no prefix is cached
            sampling = SamplingParams(
                max_tokens=8 if tokens == 1 else 1, detokenize=False, extra_args={"histospec": False}
            )
            self.llm.generate([as_prompt(prompt[:tokens])], sampling, use_tqdm=False)
        self.llm.reset_prefix_cache()

    def generate(
        self, prompts: Sequence[list[int]], samples: int, epoch: int | None, temperature: float = 1.0
    ) -> Rollouts:
        """Generates `samples` responses per prompt. `epoch`: the policy's version; None: no drafts and no history."""
        sampling = responding(epoch, temperature=temperature)
        requests = [as_prompt(prompt) for prompt in prompts for _ in range(samples)]
        before, start, cpu = self.counts, time.perf_counter(), time.process_time()
        outputs = self.llm.generate(requests, sampling, use_tqdm=False)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        responses = [list(output.outputs[0].token_ids) for output in outputs]
        return Rollouts(responses, self.counts - before, seconds, cpu)
