"""Batches of prompts as verl's trainers hand them over, and the rows of what comes back."""

from collections.abc import Iterator
from typing import Any

import numpy as np

LETTERS = "abcdefghijklmnopqrstuvwxyz"
"""What the tiny policies write, each a token of the number of its place."""

FIELDS = {"data_source": "letters", "reward_model": {"ground_truth": "a"}, "extra_info": {}}


def objects(values: Any) -> Any:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def fields(prompts: list[Any]) -> Any:
    """What verl's data set says of prompts."""
    columns = {name: objects([value] * len(prompts)) for name, value in FIELDS.items()}
    return columns | {"raw_prompt": objects(prompts), "index": np.arange(len(prompts))}


def batch(prompts: list[Any], agent: Any = None, **meta: Any) -> Any:
    """Prompts as the trainer that hands over whole batches has them; `agent`: the agent loop that takes them."""
    import torch
    from verl.protocol import DataProto

    named = {"agent_name": objects([agent] * len(prompts))} if agent else {}
    return DataProto.from_dict({"dummy": torch.zeros(len(prompts), 1)}, fields(prompts) | named, meta_info=meta)


def rolled_out(output: Any) -> Iterator[Any]:
    """(tokens, logprobs, reward) of every row of what a manager returns."""
    width = output.batch["prompts"].shape[1]
    lengths = output.batch["attention_mask"][:, width:].sum(1).tolist()
    for i, length in enumerate(lengths):
        row = {name: output.batch[name][i, :length] for name in ("responses", "rollout_log_probs", "rm_scores")}
        yield row["responses"].tolist(), row["rollout_log_probs"].numpy(), float(row["rm_scores"].sum())
