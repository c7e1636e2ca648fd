"""The models of the GPU measurements and their sizes: real ones, and toys to try the programs on a CPU (--dry)."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM

ALWAYS = 40.0  # value of the first hidden channel for every token; layers add far less to it
PREFERENCE = 2.5  # standard deviation of the logits: the likeliest of 64 tokens has a share of about a quarter


@dataclass(frozen=True)
class Shape:
    """Of a Llama."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int


@dataclass(frozen=True)
class Scale:
    """The sizes of all measurements; the defaults fit one GPU of 80 GB."""

    dry: bool = False
    shapes: dict[str, Shape] = field(
        default_factory=lambda: {  # the shapes of Qwen2.5: few KV heads, so that many long contexts fit
            "1.5B": Shape(1536, 8960, 28, 12, 2, 128, 151_936),
            "7.6B": Shape(3584, 18944, 28, 28, 4, 128, 152_064),
        }
    )
    batches: tuple[int, ...] = (8, 32, 64, 128, 256)
    windows: int = 5
    """How often each setting is timed, after a first time that warms up."""
    steps: int = 8
    """How many decoding steps are timed together."""
    context: int = 7680
    """Tokens of a prompt in the cost measurements."""
    room: int = 512
    """How many tokens its response may have, for reading prompts and for the measured steps."""
    overhead_context: int = 2048
    overhead_room: int = 2048
    history: int = 256
    """Tokens of the known responses in the overhead measurements."""
    engine: dict[str, Any] = field(
        default_factory=lambda: {
            "dtype": "bfloat16",
            "max_num_batched_tokens": 16384,
            # The logits of 256 x 17 tokens take 8 GB, which vLLM does not reserve.
            "gpu_memory_utilization": 0.85,
        }
    )
    """vLLM's arguments."""


DRY = Scale(
    dry=True,
    shapes={"toy": Shape(64, 128, 2, 2, 1, 32, 512), "larger toy": Shape(128, 256, 2, 4, 2, 32, 512)},
    batches=(2, 4, 128),  # the last one does not fit
    windows=2,
    steps=3,
    context=96,
    room=128,
    overhead_context=64,
    overhead_room=512,
    history=32,
    engine={
        "dtype": "float32",
        "enforce_eager": True,
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": 16 << 20,
    },
)


def write(folder: Path, shape: Shape, letters: int = 0) -> Path:
    """Writes a transformers folder for vLLM; returns it.

    Without `letters` it has no weights, and `load_format="dummy"` makes them. With `letters` it has weights with which
    the model generates only the first `letters` tokens, with unequal probabilities that depend on the previous tokens,
    so that drafters find repetitions in its text.
    """
    from transformers import LlamaConfig

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    if not letters:
        config.save_pretrained(folder)
    elif not (folder / "config.json").exists():
        _spelling(config, letters).save_pretrained(folder)
    return folder


def _spelling(config: "LlamaConfig", letters: int) -> "LlamaForCausalLM":
    """Sets random weights. A hidden channel that is always high lowers the logits of all tokens but the letters."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    with torch.no_grad():
        model = LlamaForCausalLM(config).bfloat16()
        model.model.embed_tokens.weight.normal_()  # the next token depends mostly on the last one
        model.model.embed_tokens.weight[:, 0] = ALWAYS
        output = model.lm_head.weight
        output[:letters, 0] = 0
        output[letters:, 0] = -ALWAYS
        logits = model(torch.arange(letters)[None]).logits[..., :letters]
        output[:letters] *= PREFERENCE / logits.float().std(-1).mean()
    return model
