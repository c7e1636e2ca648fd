"""Rollouts through verl's managers, workers and vLLM server: what the history stores and returns."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from histospec.client import Response
from tests.support.servers import Server
from tests.support.verl_batches import batch, fields, objects, rolled_out

PROMPTS = [[{"role": "user", "content": text}] for text in ("abcdefgh", "zyxwvu", "helloworld", "quickfox", "lazydog")]


@pytest.fixture(scope="module")
def manager(run: Any) -> Any:
    """For trainers that hand over whole batches."""
    return run.manager()


def test_the_engine_gets_the_arguments_of_the_page(run: Any) -> None:
    arguments = run.ray.get(run.server.engine_arguments.remote())
    assert arguments["scheduler_cls"] == "histospec.client.vllm.HistoSpecScheduler"
    assert arguments["speculative_config"] == {
        "method": "custom_class",
        "model": "histospec.client.vllm.HistoSpecProposer",
        "num_speculative_tokens": 16,
    }


def test_a_batch_is_in_the_history_once_with_all_that_verl_knows(
    run: Any, manager: Any, history: Callable[..., list[Response]]
) -> None:
    run.updated(7)
    prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[1]]
    output = manager.generate_sequences(batch(prompts, global_steps=8))
    rows = list(rolled_out(output))
    kept = {0: history(PROMPTS[0], 2), 2: history(PROMPTS[1], 1)}
    assert [len(kept[0]), len(kept[2])] == [2, 1]
    for response in kept[0] + kept[2]:
        (tokens, logprobs, reward) = next(row for row in rows if row[0] == list(response.tokens))
        assert np.allclose(np.asarray(response.logprobs), logprobs, atol=1e-5)
        assert (logprobs < 0).any()
        assert response.reward == reward == tokens.count(0)
        assert response.epoch == 7


def test_what_comes_back_is_drafted(
    manager: Any, history: Callable[..., list[Response]], shared_server: Server
) -> None:
    first = list(rolled_out(manager.generate_sequences(batch([PROMPTS[2]], validate=True))))  # validation is greedy
    history(PROMPTS[2], 1)
    before = shared_server.total("histospec_accepted_tokens_total")
    second = list(rolled_out(manager.generate_sequences(batch([PROMPTS[2]], validate=True))))
    assert first[0][0] == second[0][0]
    assert shared_server.total("histospec_accepted_tokens_total") - before > len(second[0][0]) / 2


def test_reuse_keeps_what_the_policy_accepts(
    run: Any, lines: Callable[..., list[str]], history: Callable[..., list[Response]], tmp_path: Path
) -> None:
    (page,) = lines("SPEC-RL", "yaml")
    agents = tmp_path / "spec_rl.yaml"
    agents.write_text(page + page.replace("spec_rl", "strict").replace("1.65", "0.9"))
    rollout, validation = "actor_rollout_ref.rollout", "actor_rollout_ref.rollout.val_kwargs"
    told = [line.replace("spec_rl.yaml", str(agents)) for line in lines("SPEC-RL")]
    manager = run.manager(*told, f"{validation}.temperature=1.0", f"{validation}.top_p=1.0", f"{rollout}.n=2")

    def visit(agent: Any = None, **meta: Any) -> Any:
        output = manager.generate_sequences(batch([PROMPTS[4]] * 2, agent, **meta))
        return list(rolled_out(output)), list(output.non_tensor_batch["reused_tokens"])

    first, reused = visit()
    assert reused == [0, 0]
    history(PROMPTS[4], 2)
    # The policy has not changed, and at the page's lenience it accepts what it would write again: each its own.
    second, reused = visit()
    assert reused == [60, 60]
    assert sorted(row[0] for row in second) == sorted(row[0] for row in first)
    old = {tuple(response.tokens): response for response in history(PROMPTS[4], 4)}
    third, reused = visit("strict")  # one token in ten is rejected
    assert min(reused) < 60
    for (tokens, logprobs, _), kept in zip(third, reused, strict=True):
        assert len(tokens) == len(logprobs) == 60
        same = [response for response in old.values() if list(response.tokens[:kept]) == tokens[:kept]]
        assert any(np.allclose(np.asarray(response.logprobs)[:kept], logprobs[:kept], atol=1e-3) for response in same)
        assert (logprobs[kept:] <= 0).all()
    assert visit(validate=True)[1] == [0, 0]


def test_single_rollouts_from_the_queue_are_in_the_history(run: Any, history: Callable[..., list[Response]]) -> None:
    import transfer_queue as tq
    from verl.utils import tensordict_utils as tu

    tq.init(run.config.transfer_queue)
    run.updated(8)
    columns = fields([PROMPTS[3]]) | {"uid": objects(["group"])}
    prompts = tu.get_tensordict(columns)
    tu.assign_non_tensor_data(prompts, "global_steps", 9)
    manager = run.manager("transfer_queue.enable=true")  # its workers end with it; the test does not wait for them
    manager.generate_sequences(prompts)
    kept = history(PROMPTS[3], run.config.actor_rollout_ref.rollout.n)
    assert [response.epoch for response in kept] == [8, 8]
    assert all(response.reward is not None and response.logprobs is not None for response in kept)
    tq.close()
