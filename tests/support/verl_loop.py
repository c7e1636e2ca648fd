"""verl's synchronous trainer (`trainer.use_v1`) on a machine that cannot train: the policy stays as it is.

The loop, the data set, the rollouts, the queue, rewards, advantages, validation, metrics and the logger are verl's. In
place of the training machine, this counts its versions of the policy.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import transfer_queue as tq
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

Messages = list[dict[str, str]]


class Visit:
    """The rollouts of one training step: parallel lists, one element per rollout."""

    def __init__(self, prompts: list[list[int]], responses: list[list[int]], extra: list[dict[str, Any]]) -> None:
        self.prompts = prompts
        self.responses = responses
        self.extra = extra

    def texts(self) -> list[tuple[list[int], list[int]]]:
        """Prompt and response of every rollout, in a fixed order."""
        return sorted(zip(self.prompts, self.responses, strict=True))


class Loop(PPOTrainerSync):  # type: ignore[misc]
    """Trains on nothing. `visits` has what each step sampled.

    Args:
        config: verl's.
        updated: tells verl's server the version of its policy.
        rewards: verl's reward workers.
    """

    def __init__(self, config: Any, updated: Callable[[int], None], rewards: list[Any]) -> None:
        super().__init__(config)
        self.visits: list[Visit] = []
        self.global_steps = 0
        self.checkpoint_manager = SimpleNamespace(update_weights=updated, sleep_replicas=lambda: None)
        self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=rewards)
        self.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
        self.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0]})
        self._init_tokenizer()
        self._init_dataloader()
        self._init_dump_executor()
        self.on_init_end()

    def _update_actor(self, batch: Any, metrics: Any) -> Any:
        fields = ["prompts", "responses", "extra_fields"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        prompts, responses = ([row.tolist() for row in data[name].unbind()] for name in fields[:2])
        extra = [getattr(value, "data", value) for value in data["extra_fields"]]
        self.visits.append(Visit(prompts, responses, extra))
        return batch


def settings(folder: Path, train: Sequence[Messages], validation: Sequence[Messages], epochs: int) -> list[str]:
    """Overrides for a loop that visits all training prompts in one step, and validates after the last one."""
    files = {"train_files": train, "val_files": validation}
    for name, prompts in files.items():
        rows = [
            {
                "prompt": prompt,
                "data_source": "letters",
                "reward_model": {"ground_truth": "a"},
                "extra_info": {"index": i},
            }
            for i, prompt in enumerate(prompts)
        ]
        (folder / f"{name}.json").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return [
        *(f"data.{name}={folder / name}.json" for name in files),
        f"data.train_batch_size={len(train)}", "data.dataloader_num_workers=0", "data.shuffle=false",
        "algorithm.adv_estimator=grpo", "algorithm.rollout_correction.bypass_mode=true",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={len(train)}", "transfer_queue.enable=true",
        "trainer.logger=[file]", "trainer.val_before_train=false", f"trainer.test_freq={epochs}",
        "trainer.save_freq=-1", "trainer.resume_mode=disable", f"trainer.total_epochs={epochs}",
    ]  # fmt: skip


def logged(file: Path) -> list[dict[str, float]]:
    """What verl's logger wrote for every training step."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row["data"] for row in rows if "training/global_step" in row["data"]]
