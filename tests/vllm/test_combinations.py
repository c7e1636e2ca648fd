"""What RL runs combine with drafts: LoRA, mixtures of experts, pauses with new weights, log-probabilities, grammars.

docs/combinations.md has the table, with what other tests run and what vLLM refuses.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients import texts as texts_of
from tests.support.engines import MakeClient, Prompts, StartEngine
from tests.support.servers import Server
from tests.support.tiny_policy import ALPHABET

pytestmark = [pytest.mark.vllm, pytest.mark.newest]

RANK = 4
CPU_FLAGS = Path("/proc/cpuinfo").read_text()


def lora(folder: Path, model: str, seed: int) -> str:
    """Writes an adapter of random weights for the projections of attention, as peft does. Returns its folder."""
    import json

    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig

    size, layers = (getattr(AutoConfig.from_pretrained(model), n) for n in ("hidden_size", "num_hidden_layers"))
    chance = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(layers):
        for name in ("q_proj", "v_proj"):
            of = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{of}.lora_A.weight"] = torch.randn(RANK, size, generator=chance)
            weights[f"{of}.lora_B.weight"] = torch.randn(size, RANK, generator=chance) / 2
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


# vLLM's V2 (0.32, 0.33) fails on a CPU with any speculation: it counts one sampled position per request.
@pytest.mark.v1
def test_requests_with_adapters_of_their_own(
    engine: StartEngine, shared_server: Server, prompts: Prompts, tiny_model: str, tmp_path: Path
) -> None:
    """The base model and two adapters write to each prompt in one batch. They share its history, not its text."""
    from vllm.lora.request import LoRARequest

    adapters = [None, *(LoRARequest(f"a{i}", i, lora(tmp_path / f"a{i}", tiny_model, i)) for i in (1, 2))]
    pairs = [(prompt, adapter) for prompt in prompts[:4] for adapter in adapters]
    # vLLM gives requests without an adapter the last one on a CPU (0.32), so that one stays empty.
    options = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}

    def visit(rollouts: Any) -> Any:
        rollouts.start([prompt for prompt, _ in pairs], lora=[adapter for _, adapter in pairs])
        return rollouts.finish()

    expected = visit(engine(**options))
    assert len({tuple(text[0]) for text in expected}) == len(pairs)  # an adapter changes the text
    drafting = engine(shared_server.endpoint, **options)
    assert visit(drafting) == expected
    assert visit(drafting) == expected
    assert drafting.counter("spec_decode_num_accepted_tokens") > len(pairs) * 20


def test_weights_change_while_requests_are_in_flight(
    engine: StartEngine, shared_server: Server, make_client: MakeClient, prompts: Prompts, tiny_model: str
) -> None:
    """
    1. While the engine is paused, a step does nothing.
    2. Texts go on with the new weights as those without drafts do.
    3. The history has the whole texts.
    """
    import torch
    from transformers import AutoModelForCausalLM

    def weights(scale: float) -> list[tuple[str, Any]]:
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        return [(name, tensor.detach() * scale) for name, tensor in model.state_dict().items()]

    def load(rollouts: Any, scale: float) -> None:
        rollouts.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights(scale))})

    drafting = engine(shared_server.endpoint, fresh=True)
    drafting.generate(prompts)
    core = drafting.llm.llm_engine.engine_core.engine_core
    drafting.start(prompts)
    drafting.step(3)
    texts = {request.request_id: list(request.output_token_ids) for request in drafting.scheduler.running}
    core.pause_scheduler("keep", clear_cache=False)
    drafting.step(5)
    assert texts == {request.request_id: list(request.output_token_ids) for request in drafting.scheduler.running}
    load(drafting, 0.5)
    drafting.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
    core.resume_scheduler()
    written = [text for (text,) in drafting.finish()]

    plain = engine(fresh=True)
    load(plain, 0.5)
    begun = [next(text for name, text in texts.items() if name.startswith(of)) for of in drafting.ids]
    for prompt, before, text in zip(prompts, begun, written, strict=True):
        assert text[: len(before)] == before
        ((rest,),) = plain.generate([prompt + before], max_tokens=40 - len(before))
        assert text == before + rest
    client = make_client(shared_server.endpoint)
    for prompt, text in zip(prompts, written, strict=True):
        assert text in texts_of(client.history(prompt))


def test_prompts_from_the_prefix_cache(engine: StartEngine, shared_server: Server, prompts: Prompts) -> None:
    """Every prompt begins alike, over two blocks, and returns."""
    options = {"block_size": 32}
    long: Prompts = [[*range(32), *range(31, -1, -1), *prompt] for prompt in prompts]
    expected = engine(**options).generate(long)
    drafting = engine(shared_server.endpoint, **options)
    assert drafting.generate(long) == expected
    before = drafting.counter("prefix_cache_hits")
    assert drafting.generate(long) == expected
    assert drafting.counter("prefix_cache_hits") - before >= 64 * len(long)
    assert drafting.counter("spec_decode_num_accepted_tokens") > 0


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_log_probabilities(engine: StartEngine, shared_server: Server, prompts: Prompts, mode: str) -> None:
    """For truncated importance sampling: those of sampled tokens are those without drafts, but for rounding."""
    sampling = {"logprobs": 0, "repetition_penalty": 1.2}  # so that processed ones differ from raw ones

    def visit(rollouts: Any) -> tuple[Prompts, list[list[float]]]:
        rollouts.start(prompts, **sampling)
        done = [output.outputs[0] for output in rollouts.outputs()]
        return [list(one.token_ids) for one in done], [
            [at[token].logprob for token, at in zip(one.token_ids, one.logprobs, strict=True)] for one in done
        ]

    texts, expected = visit(engine(logprobs_mode=mode))
    drafting = engine(shared_server.endpoint, logprobs_mode=mode)
    for _ in range(2):
        again, found = visit(drafting)
        assert again == texts
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, abs=1e-4)
    assert drafting.counter("spec_decode_num_accepted_tokens") > 0


def test_a_grammar_at_temperature_1(engine: StartEngine, shared_server: Server, prompts: Prompts) -> None:
    """Every response obeys it, with drafts of responses that did not."""
    from vllm.sampling_params import StructuredOutputsParams

    grammar = "([a-h]{4}[0-3]){6}"
    sampling = {
        "temperature": 1, "n": 4, "max_tokens": 30, "structured_outputs": StructuredOutputsParams(regex=grammar),
    }  # fmt: skip
    drafting = engine(shared_server.endpoint, skip_tokenizer_init=False)
    drafting.generate(prompts)
    for _ in range(2):
        texts = drafting.generate(prompts, **sampling)
        assert all(
            re.fullmatch(grammar, "".join(ALPHABET[token] for token in text)) for group in texts for text in group
        )


def test_a_mixture_of_experts(engine: StartEngine, shared_server: Server, prompts: Prompts, mixture: str) -> None:
    visit_twice(engine, shared_server, prompts, model=mixture)


def test_a_mixture_of_experts_is_new_for_each_test(engine: StartEngine, prompts: Prompts, mixture: str) -> None:
    first = engine(model=mixture)
    written = first.generate(prompts)
    first.close()
    assert engine(model=mixture).generate(prompts) == written


@pytest.mark.skipif("avx512f" not in CPU_FLAGS, reason="needs a CPU with AVX-512, as vLLM's cache of FP8 does")
def test_a_cache_of_fp8(engine: StartEngine, shared_server: Server, prompts: Prompts) -> None:
    visit_twice(engine, shared_server, prompts, kv_cache_dtype="fp8")


def visit_twice(engine: StartEngine, server: Server, prompts: Prompts, **options: Any) -> None:
    """Both visits write what an engine without drafts writes. options: vLLM's arguments of both engines."""
    expected = engine(**options).generate(prompts)
    drafting = engine(server.endpoint, **options)
    assert drafting.generate(prompts) == expected
    assert drafting.generate(prompts) == expected
    assert drafting.counter("spec_decode_num_accepted_tokens") > 0
