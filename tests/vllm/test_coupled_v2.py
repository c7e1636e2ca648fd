"""Coupled sampling with vLLM's model runner V2: a seed gives the text of vLLM without drafts, whatever is drafted.

Its kernels run in Triton's interpreter (`make test-v2`).
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from histospec.client.vllm.patches.replacing import is_replaced
from tests.support import any_drafts, sampling_check
from tests.support.engines import StartEngine
from tests.support.position_noise import KNOWN, position_noise

pytestmark = [pytest.mark.vllm, pytest.mark.v2]

LENGTH = 30
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.6, "top_p": 0.9, "top_k": 8, "logprobs": 2},
    {"temperature": 1.0},
    {"temperature": 1.2, "top_k": 5, "repetition_penalty": 1.3},
    {"temperature": 1.0, "top_p": 0.7, "logprobs": 0},
    {"temperature": 1.2, "top_p": 0.9, "presence_penalty": 0.5},
    {"temperature": 0.6},
    {"temperature": 0.0, "logprobs": 1},
]
Texts = list[list[int]]


@pytest.fixture(scope="module", autouse=True)
def verify() -> Iterator[Any]:
    """vLLM's own verification. Engines of this module replace it, and no others."""
    rejection = pytest.importorskip("vllm.v1.worker.gpu.spec_decode.rejection_sampler", exc_type=ImportError)
    own = rejection.rejection_sample
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(rejection, "rejection_sample", own)  # undone at the end
        # vLLM's way without Triton: in the interpreter, its kernel for top-k and top-p takes minutes here.
        changed.setattr("vllm.v1.sample.ops.topk_topp_sampler.HAS_TRITON", False)
        changed.setenv("HISTOSPEC_SAMPLING", "coupled")
        yield own


def parameters(i: int, **more: Any) -> Any:
    from vllm import SamplingParams

    seed = [i, -i - 2, 2**62 + i][i % 3]
    options = OPTIONS[i % len(OPTIONS)] | {"max_tokens": LENGTH, "detokenize": False, "seed": seed} | more
    return SamplingParams(extra_args={"i": i}, **options)


def roll(rollouts: Any, prompts: list[list[int]]) -> list[Any]:
    """Returns a vLLM output for each prompt, which have seeds and options of their own."""
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = rollouts.llm.generate(requests, [parameters(i) for i in range(len(prompts))], use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def texts(outputs: list[Any]) -> Texts:
    return [list(output.token_ids) for output in outputs]


@pytest.fixture(scope="module")
def truth(start_engine: StartEngine, prompts: list[list[int]]) -> list[Any]:
    """What vLLM writes without speculation."""
    with contextlib.ExitStack() as stack:
        return roll(start_engine(stack), prompts)


@pytest.fixture
def anyhow(engine: StartEngine, nowhere: str, truth: list[Any]) -> Callable[..., Any]:
    """anyhow(...) -> Rollouts with right, wrong, cut, long and missing drafts at random; arguments are vLLM's."""

    def right(request: Any) -> list[int]:
        i = (request.sampling_params.extra_args or {}).get("i")
        return [] if i is None else list(truth[i].token_ids)[request.num_output_tokens :]

    def start(**arguments: Any) -> Any:
        rollouts = engine(nowhere, **{"max_model_len": 256} | arguments)
        any_drafts.make(rollouts.scheduler, right)
        return rollouts

    return start


@any_drafts.SCHEDULES
def test_drafts_change_no_token(
    anyhow: Callable[..., Any], prompts: list[list[int]], truth: list[Any], arguments: Any
) -> None:
    """At every temperature, with top-k, top-p and penalties; and the log-probabilities are those of the text."""
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    rollouts = anyhow(**arguments)
    assert is_replaced(rejection_sampler, "rejection_sample")
    found = roll(rollouts, prompts)
    assert texts(found) == texts(truth)
    assert len({str(text) for text in texts(found)}) == len(prompts)
    assert 0 < rollouts.counter("spec_decode_num_accepted_tokens") < rollouts.counter("spec_decode_num_draft_tokens")
    if "num_gpu_blocks_override" in arguments:
        assert rollouts.counter("num_preemptions") > 0
    for one, other in zip(found, truth, strict=True):
        assert (one.logprobs is None) == (other.logprobs is None)
        for place, wanted in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert place.keys() == wanted.keys()
            assert [each.logprob for each in place.values()] == pytest.approx(
                [each.logprob for each in wanted.values()], abs=1e-4
            )


def test_right_drafts_are_accepted_and_wrong_ones_are_not(
    anyhow: Callable[..., Any], prompts: list[list[int]], truth: list[Any]
) -> None:
    rollouts = anyhow()
    seen = rollouts.scheduler

    def all_of(change: int) -> dict[str, list[int]]:
        found = {}
        for request in seen.running:
            right = truth[request.sampling_params.extra_args["i"]].token_ids[request.num_output_tokens :]
            found[request.request_id] = [(token + change) % 32 for token in right[:3]]
        return found

    seen._sessions.collect_tokens = lambda vocabulary: all_of(0)
    assert texts(roll(rollouts, prompts)) == texts(truth)
    drafted, right = (rollouts.counter(f"spec_decode_num_{what}_tokens") for what in ("draft", "accepted"))
    assert right == drafted > len(prompts) * LENGTH / 2
    seen._sessions.collect_tokens = lambda vocabulary: all_of(1)
    assert texts(roll(rollouts, prompts)) == texts(truth)
    assert rollouts.counter("spec_decode_num_accepted_tokens") == right


def test_vllms_own_verification_is_noticed(
    anyhow: Callable[..., Any], verify: Any, prompts: list[list[int]], truth: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control of the bed: if this were not noticed, the tests above would show nothing."""
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    rollouts = anyhow()
    monkeypatch.setattr(rejection_sampler, "rejection_sample", verify)
    found = texts(roll(rollouts, prompts))
    assert found != texts(truth)
    greedy = [i for i in range(len(prompts)) if OPTIONS[i % len(OPTIONS)]["temperature"] == 0]
    assert [found[i] for i in greedy] == [list(truth[i].token_ids) for i in greedy]


def test_the_servers_noise_is_that_of_vllm(engine: StartEngine, prompts: list[list[int]]) -> None:
    """Each token is the best of its log-probabilities and the noise of the position before it."""
    from vllm import SamplingParams

    llm = engine(max_logprobs=32).llm
    sampling = [SamplingParams(max_tokens=LENGTH, detokenize=False, seed=-7 * i, logprobs=32) for i in range(4)]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts[:4]], sampling, use_tqdm=False)
    likely = 0
    for seed, output in zip((0, -7, -14, -21), outputs, strict=True):
        response = output.outputs[0]
        for i, token in enumerate(response.token_ids):
            logprobs = np.array([response.logprobs[i][each].logprob for each in range(32)])
            noise = position_noise(seed, len(output.prompt_token_ids) + i - 1, np.arange(32))
            assert np.argmax(logprobs + noise) == token
            likely += int(np.argmax(logprobs)) == token
    assert likely < 4 * LENGTH * 0.95  # the noise decides


def test_known_answers_of_vllms_kernel() -> None:
    import torch
    import triton
    import triton.language as tl
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax

    @triton.jit  # type: ignore[untyped-decorator]
    def noise_of(out, seeds, positions, tokens, noised: tl.constexpr):  # type: ignore[no-untyped-def]
        i = tl.program_id(0)
        key = tl.load(tokens + i) + tl.arange(0, 1)
        seed, position, logits = tl.load(seeds + i), tl.load(positions + i), tl.zeros([1], tl.float32)
        value, _ = noised(logits, key, key >= 0, seed, position, 1.0, IS_DRAFTING=False, USE_FP64=False)
        tl.store(out + i, value)

    rows = [(seed, position, token) for seed, position, tokens, _ in KNOWN for token in tokens]
    seeds, positions, tokens = (torch.tensor(column) for column in zip(*rows, strict=True))
    out = torch.zeros(len(rows))
    noise_of[(len(rows),)](out, seeds, positions, tokens.int(), gumbel_noised_argmax)
    assert out.tolist() == pytest.approx([noise for *_, known in KNOWN for noise in known], abs=2e-6)


@pytest.mark.parametrize("responses", [500, pytest.param(4000, marks=pytest.mark.long)])
def test_it_samples_the_models_distribution(anyhow: Callable[..., Any], tiny_model: str, responses: int) -> None:
    """Without a seed of the user: the adapter gives each response its own. The drafts are random."""
    from vllm import SamplingParams

    rollouts = anyhow()
    sampling = SamplingParams(temperature=1, max_tokens=sampling_check.LENGTH, detokenize=False, n=responses)
    (output,) = rollouts.llm.generate([{"prompt_token_ids": sampling_check.PROMPT}], sampling, use_tqdm=False)
    tokens = np.array([list(each.token_ids) for each in output.outputs])
    assert rollouts.counter("spec_decode_num_accepted_tokens") > 0
    probability = sampling_check.joint(tiny_model)
    for first in range(sampling_check.LENGTH - 1):
        pair = probability.sum(tuple(a for a in range(sampling_check.LENGTH) if a not in (first, first + 1)))
        counts = np.zeros(pair.shape)
        np.add.at(counts, (tokens[:, first], tokens[:, first + 1]), 1)
        assert sampling_check.deviation(counts, pair * len(tokens)) < 5
