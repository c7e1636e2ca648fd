"""The policy: a Llama of about a million parameters, and the functions that training needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from examples.tiny_rl.task import END_ID, LONGEST, VOCABULARY

SHIPPED = Path(__file__).parent / "weights.safetensors"
"""The warm-started policy in half precision, made by make_weights.py."""
SHIPPED_DRAFTER = Path(__file__).parent / "drafter.safetensors"
"""A draft model for the policy in half precision, made by make_drafter.py."""


@dataclass(frozen=True)
class Size:
    """The size of a model; by default, of the shipped policy."""

    hidden: int = 128
    intermediate: int = 384
    layers: int = 4
    heads: int = 4


SMALL = Size()
DRAFTER = Size(hidden=64, intermediate=192, layers=2, heads=2)
"""The size of the shipped draft model."""


def fresh(size: Size = SMALL, device: str = "cpu", dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Returns a randomly initialised policy. Its embeddings are untied: small models with tied ones learn nothing."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=size.hidden,
            intermediate_size=size.intermediate,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=END_ID,
            pad_token_id=END_ID,
        )
    )
    return nn.Module.to(model, device, dtype)


def load(path: Path = SHIPPED, size: Size = SMALL) -> LlamaForCausalLM:
    """Returns the model with the weights of `path`, in float32."""
    model = fresh(size)
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(path).items()})
    return model


def save(model: LlamaForCausalLM, path: Path = SHIPPED) -> None:
    """Writes the weights of `model` to `path` in half precision."""
    save_file({name: tensor.half().contiguous() for name, tensor in model.state_dict().items()}, path)


def pack(prompts: Sequence[list[int]], responses: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """Returns right-padded tokens int64[n, longest], and a mask float32[n, longest - 1]: 1 for tokens of responses."""
    longest = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    tokens, mask = torch.full((len(prompts), longest), END_ID), torch.zeros(len(prompts), longest)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        end = len(prompt) + len(response)
        tokens[i, :end] = torch.tensor(prompt + response)
        mask[i, len(prompt) : end] = 1
    return tokens, mask[:, 1:]


def logprobs(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Returns the log-probability of every token but the first, given those before it: float32[n, longest - 1]."""
    logits = model(tokens[:, :-1]).logits
    return torch.log_softmax(logits, -1).gather(2, tokens[:, 1:, None])[..., 0]


@torch.no_grad()  # type: ignore[untyped-decorator]
def respond(model: LlamaForCausalLM, prompts: Sequence[list[int]], sample: bool = True) -> list[list[int]]:
    """Returns one response per prompt: token ids, with the end token if there is one.

    `sample`: at temperature 1; otherwise at temperature 0.
    """
    responses: list[list[int]] = [[] for _ in prompts]
    for length in sorted(set(map(len, prompts))):  # generate() needs prompts of one length
        same = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        tokens = torch.tensor([prompts[i] for i in same], device=model.device)
        how = {"do_sample": True, "top_k": 0} if sample else {"do_sample": False}
        output = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=LONGEST, **how)
        assert isinstance(output, Tensor)  # only with return_dict_in_generate is it an object
        for i, row in zip(same, output[:, length:].tolist(), strict=True):
            responses[i] = row[: row.index(END_ID) + 1] if END_ID in row else row
    return responses
