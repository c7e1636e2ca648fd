"""Tiny drafters of every kind that vLLM supports, trained in seconds for a tiny Llama.

Each is one small network beside the policy, trained on what the policy itself writes:

- `draft_model`: a Llama of one layer, for vLLM's method of that name;
- `eagle`, `eagle3`: a decoder layer that continues the policy's hidden states, with the policy's embedding and head;
- `medusa`: a residual block for each of the next tokens;
- `mtp`: the policy as a MiMo (a Qwen2 with a layer that predicts one token more), so it is a target as well.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    torch: Any
    nn: Any
    Module = Any
    Tensor = Any
else:
    import torch
    from torch import Tensor, nn
    from torch.nn import Module

from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

RATE = 5e-3
EPOCHS = 6
BATCH = 32
MEDUSA_HEADS = 3


class Eagle(Module):  # type: ignore[misc]
    """EAGLE: embedding of the next token and hidden state of this one, to the hidden state of the next one."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        config = policy.config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = LlamaDecoderLayer(config, 0)
        self.layer.input_layernorm = nn.Identity()
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, embedded: Tensor, state: Tensor) -> Tensor:
        x = self.fc(torch.cat([embedded, state], -1))
        return self.layer(x, position_embeddings=_rotation(self.rotary, x))

    def weights(self, policy: Any) -> dict[str, Tensor]:
        """As EAGLE's checkpoints name them."""
        return {"fc.weight": self.fc.weight} | {f"layers.0.{n}": w for n, w in self.layer.named_parameters()}


class Eagle3(Module):  # type: ignore[misc]
    """EAGLE-3: the same from the states between the policy's layers, with a wider attention and its own head."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        config = policy.config
        width, layer = config.hidden_size, LlamaDecoderLayer(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(layer.self_attn, name)
            setattr(layer.self_attn, name, nn.Linear(2 * width, narrow.out_features, bias=False))
        self.fc = nn.Linear(width * len(aux_layers(policy)), width, bias=False)
        self.layer, self.rotary = layer, LlamaRotaryEmbedding(config)
        self.hidden_norm, self.norm = (LlamaRMSNorm(width, config.rms_norm_eps) for _ in range(2))
        self.head = nn.Linear(width, config.vocab_size, bias=False)
        self.head.weight.data.copy_(policy.lm_head.weight)

    def read(self, states: Tensor) -> Tensor:
        return self.fc(states)

    def forward(self, embedded: Tensor, state: Tensor) -> Tensor:
        residual, layer = state, self.layer
        x = torch.cat([layer.input_layernorm(embedded), self.hidden_norm(residual)], -1)
        attended, _ = layer.self_attn(x, position_embeddings=_rotation(self.rotary, x), attention_mask=None)
        residual = residual + attended
        return residual + layer.mlp(layer.post_attention_layernorm(residual))

    def logits(self, state: Tensor) -> Tensor:
        return self.head(self.norm(state))

    def weights(self, policy: Any) -> dict[str, Tensor]:
        """As EAGLE-3's checkpoints name them."""
        own = {f"midlayer.{n}": w for n, w in self.layer.named_parameters()}
        own |= {"midlayer.hidden_norm.weight": self.hidden_norm.weight, "norm.weight": self.norm.weight}
        own |= {"fc.weight": self.fc.weight, "lm_head.weight": self.head.weight}
        return own | {"embed_tokens.weight": policy.get_input_embeddings().weight}


class MultiToken(Module):  # type: ignore[misc]
    """MiMo's layer: hidden state before the policy's last norm and embedding of the next token."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        config = policy.config
        width = config.hidden_size
        self.hidden_layernorm, self.token_layernorm, self.final_layernorm = (
            LlamaRMSNorm(width, config.rms_norm_eps) for _ in range(3)
        )
        self.input_proj = nn.Linear(2 * width, width, bias=False)
        self.layer, self.rotary = LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config)

    def forward(self, embedded: Tensor, state: Tensor) -> Tensor:
        embedded = torch.cat([torch.zeros_like(embedded[:, :1]), embedded[:, 1:]], 1)  # as MiMo at position 0
        x = self.input_proj(torch.cat([self.hidden_layernorm(state), self.token_layernorm(embedded)], -1))
        return self.final_layernorm(self.layer(x, position_embeddings=_rotation(self.rotary, x)))


class Medusa(Module):  # type: ignore[misc]
    """Medusa: from the hidden state of one token to the tokens two, three, … places further on."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        width = policy.config.hidden_size
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(MEDUSA_HEADS))
        for block in self.blocks:
            nn.init.zeros_(block.weight)
        self.heads = nn.ModuleList(nn.Linear(width, policy.config.vocab_size, bias=False) for _ in self.blocks)
        for head in self.heads:
            head.weight.data.copy_(policy.lm_head.weight)

    def forward(self, hidden: Tensor) -> list[Tensor]:
        return [
            head(hidden + nn.functional.silu(block(hidden)))
            for block, head in zip(self.blocks, self.heads, strict=True)
        ]

    def weights(self, policy: Any) -> dict[str, Tensor]:
        """As vLLM's model names them."""
        named = {f"blocks.{i}.layers.0.weight": b.weight for i, b in enumerate(self.blocks)}
        return named | {f"lm_heads.{i}.weight": h.weight for i, h in enumerate(self.heads)}


def aux_layers(policy: Any) -> list[int]:
    """The states that EAGLE-3 reads: before the first layer, between, behind the last."""
    layers = policy.config.num_hidden_layers
    return sorted({0, layers // 2, layers})


@torch.no_grad()  # type: ignore[untyped-decorator]
def written(policy_path: str, responses: int, length: int) -> Tensor:
    """int64[responses, length]: what a policy, a folder of transformers', writes at temperature 1 to random beginnings.

    A beginning has four tokens.
    """
    policy = AutoModelForCausalLM.from_pretrained(policy_path).eval()
    torch.manual_seed(0)
    begun = torch.randint(policy.config.vocab_size, (responses, 4))
    return policy.generate(
        begun, attention_mask=torch.ones_like(begun), do_sample=True, top_k=0, min_new_tokens=length - 4,
        max_new_tokens=length - 4, pad_token_id=0,
    )  # fmt: skip


def make(kind: str, policy_path: str, text: Tensor, out: Path) -> float:
    """Trains a drafter and writes its folder.

    Args:
        kind: draft_model, eagle, eagle3, medusa or mtp.
        policy_path: folder of a Llama of transformers' with untied embeddings.
        text: int64[n, length], written by the policy.
        out: its folder; made.

    Returns:
        float: on the last eighth of the text, which it did not see, the share of the tokens that it predicts as the
        policy's likeliest one.
    """
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_pretrained(policy_path).float().eval().requires_grad_(False)
    held_out = len(text) // 8
    learn, test = text[held_out:], text[:held_out]
    train = {"draft_model": _small_model, "medusa": _medusa}.get(kind, _head)
    out.mkdir(parents=True, exist_ok=True)
    return train(kind, policy, learn, test, out)


def _small_model(kind: str, policy: Any, learn: Tensor, test: Tensor, out: Path) -> float:
    config = LlamaConfig(**policy.config.to_dict() | {"num_hidden_layers": 1})
    model = LlamaForCausalLM(config)
    _optimize(model, learn, lambda batch: _agree(model(input_ids=batch).logits, policy(input_ids=batch).logits))
    model.save_pretrained(out)
    with torch.no_grad():
        return _share(model(input_ids=test).logits, policy(input_ids=test).logits)


def _medusa(kind: str, policy: Any, learn: Tensor, test: Tensor, out: Path) -> float:
    model = Medusa(policy)

    def pairs(batch: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each head's logits at a place, and the policy's own as many places further on."""
        with torch.no_grad():
            hidden = policy.model(batch).last_hidden_state
            truth = policy.lm_head(hidden)
        for ahead, logits in enumerate(model(hidden), 1):
            yield logits[:, :-ahead], truth[:, ahead:]

    _optimize(model, learn, lambda batch: sum(_agree(*pair) for pair in pairs(batch)))
    size = {"hidden_size": policy.config.hidden_size, "vocab_size": policy.config.vocab_size}
    config = {"model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": MEDUSA_HEADS}
    _write(out, config | size | {"num_hidden_layers": 1}, model.weights(policy))
    with torch.no_grad():
        return _share(*next(pairs(test)))


def _head(kind: str, policy: Any, learn: Tensor, test: Tensor, out: Path) -> float:
    head: Any = {"eagle": Eagle, "eagle3": Eagle3, "mtp": MultiToken}[kind](policy)
    logits_of = head.logits if kind == "eagle3" else policy.lm_head

    def states(batch: Tensor) -> tuple[Tensor, Tensor]:
        """What the head starts from at each place, and the policy's logits there."""
        between: list[Tensor] = []
        hooks = [
            part.register_forward_pre_hook(lambda _, args: between.append(args[0]))
            for part in (*policy.model.layers, policy.model.norm)
        ]
        with torch.no_grad():
            last = policy.model(batch).last_hidden_state
        for hook in hooks:
            hook.remove()
        if kind == "eagle3":
            start = head.read(torch.cat([between[i] for i in aux_layers(policy)], -1))
        else:
            start = last if kind == "eagle" else between[-1]
        return start, policy.lm_head(last)

    def compared(batch: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits of the first and of the second token of a draft, each with the policy's own."""
        state, truth = states(batch)
        embedded = policy.get_input_embeddings()(batch)
        for _ in range(2):
            state, embedded, truth = head(embedded[:, 1:], state[:, :-1]), embedded[:, 1:], truth[:, 1:]
            yield logits_of(state), truth

    _optimize(head, learn, lambda batch: sum(_agree(*pair) for pair in compared(batch)))
    if kind == "mtp":
        _write_mimo(policy, head, out)
    else:
        config = policy.config.to_dict() | {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
        if kind == "eagle3":
            config["draft_vocab_size"] = config["vocab_size"]
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": aux_layers(policy)}
        _write(out, config, head.weights(policy))
    with torch.no_grad():
        return _share(*next(compared(test)))


def _optimize(model: Any, text: Tensor, loss_of: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    batches = [batch for _ in range(EPOCHS) for batch in text[torch.randperm(len(text))].split(BATCH)]
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 - step / len(batches))
        loss = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _agree(logits: Tensor, truth: Tensor) -> Tensor:
    """Cross entropy with the policy's distribution: a drafter is to think as it does."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), truth.softmax(-1).flatten(0, 1))


def _share(logits: Tensor, truth: Tensor) -> float:
    return float((logits.argmax(-1) == truth.argmax(-1)).float().mean())


def _rotation(rotary: Any, x: Tensor) -> Any:
    return rotary(x, torch.arange(x.shape[1])[None])


def _write(out: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    (out / "config.json").write_text(json.dumps(config, indent=1, default=str))
    save_file(
        {name: weight.detach().clone().contiguous() for name, weight in weights.items()}, out / "model.safetensors"
    )


def _write_mimo(policy: Any, head: MultiToken, out: Path) -> None:
    """The policy and its head as one model: MiMo is a Qwen2, which is a Llama with biases before the attention."""
    weights = dict(policy.state_dict())
    layer = {f"model.mtp_layers.0.{n}": w for n, w in head.layer.named_parameters()}
    for own in ("hidden_layernorm", "token_layernorm", "final_layernorm", "input_proj"):
        layer[f"model.mtp_layers.0.{own}.weight"] = getattr(head, own).weight
    for name, weight in (*weights.items(), *layer.items()):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            layer[name.replace("weight", "bias")] = torch.zeros(len(weight))
    keep = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "hidden_act",
            "tie_word_embeddings", "bos_token_id", "eos_token_id", "dtype")  # fmt: skip
    config = {key: value for key, value in policy.config.to_dict().items() if key in keep}
    config |= {"model_type": "qwen2", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    _write(out, config, weights | layer)
