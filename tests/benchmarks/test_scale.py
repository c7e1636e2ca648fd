"""The cost model and the simulation of benchmarks/scale/run.py, where the answer is known otherwise."""

import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.scale.model import PARALLEL, Costs, Plan, divided, fit
from benchmarks.scale.simulation import SENDING, Surroundings, cheapest_shards, fewest_shards, simulate, tried
from histospec.protocol.placement import place, problem_digest

ROOT = Path(__file__).parents[2]
NOTHING = Costs(*[0.0] * len(asdict(Costs())))
EXACT = Surroundings(
    deadline_ms=1e6, network_ms=0, jitter_ms=0, service_spread=0, decode_spread=0, threads=1, warm=1, in_vllm=False
)
PLAN = Plan(gpus=8)
FEW = Plan(gpus=4, sequences=64)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_shard_waits_as_queueing_theory_says(load: float) -> None:
    """Steps that come at random to a server that takes 1 ms for each: Pollaczek and Khinchine."""
    plan = Plan(gpus=500, step_ms=500 / load)
    outcome = simulate(plan, 1, replace(NOTHING, message=1000.0), replace(EXACT, decode_spread=1.0), steps=100)
    assert outcome.millis.mean() == pytest.approx(1 + load / (2 * (1 - load)), rel=0.05)
    assert outcome.busy.mean() == pytest.approx(load, rel=0.05)


def test_workers_in_lockstep_are_served_one_after_the_other() -> None:
    around = replace(EXACT, lockstep=True)
    outcome = simulate(Plan(gpus=8), 1, replace(NOTHING, message=1000.0), around, steps=3)
    assert sorted(outcome.millis[:8]) == pytest.approx([1, 2, 3, 4, 5, 6, 7, 8])
    assert outcome.waiting == pytest.approx(8 / 38)  # all go on with the last


def test_a_step_ends_with_its_slowest_message() -> None:
    """One worker: 16 problems on two shards; its step takes as long as the shard with more of them."""
    outcome = simulate(Plan(gpus=1), 2, replace(NOTHING, problem=1000.0), EXACT, steps=50, seed=3)
    took = outcome.millis[0]
    assert 8 <= took < 16
    assert outcome.busy.max() / outcome.busy.sum() == pytest.approx(took / 16, rel=0.02)


def test_threads_share_the_sessions_of_a_large_message() -> None:
    """The CPU time stays. A message of 16 sessions is too small to share."""
    for sequences, share in ((16, 1.0), (64, 1 - PARALLEL / 2)):
        plan = Plan(gpus=1, sequences=sequences)
        outcome = simulate(plan, 1, replace(NOTHING, session=100.0), replace(EXACT, threads=2), steps=50)
        assert outcome.millis[0] == pytest.approx(0.1 * sequences * share)
        assert outcome.busy[0] / outcome.cores == pytest.approx(share, rel=0.02)


def test_what_shares_a_core_waits_for_it() -> None:
    """Two workers in lockstep ask two shards each. A message takes 1 ms of its worker and 1 ms of its shard."""
    plan, costs = Plan(gpus=2, step_ms=100), replace(NOTHING, message=1000.0, client_message=1000.0)
    alone = simulate(plan, 2, costs, replace(EXACT, lockstep=True), steps=3)
    assert sorted(alone.millis[:2]) == pytest.approx([3, 4])
    shared = simulate(plan, 2, costs, replace(EXACT, lockstep=True, cores=1), steps=3)
    assert max(shared.millis) == pytest.approx(2 * (SENDING * 2 + 2) + (1 - SENDING) * 2)
    assert simulate(plan, 2, costs, replace(EXACT, lockstep=True, cores=99), steps=3).millis.tolist() == (
        alone.millis.tolist()
    )


def test_bookkeeping_of_vllm_hides_answers() -> None:
    """The worker's own time stays: 1 ms for a message, 2 for two. Bookkeeping takes 3 ms; one answer takes 2, or 5."""
    plan, around = Plan(gpus=1, step_ms=100), replace(EXACT, in_vllm=True)
    costs = replace(NOTHING, adapter_step=1000.0, adapter_message=1000.0, hidden_step=3000.0)
    waits = [simulate(plan, 1, replace(costs, message=us), around, steps=3) for us in (2000.0, 5000.0)]
    assert [outcome.millis.tolist() for outcome in waits] == [pytest.approx([1.0] * 3), pytest.approx([3.0] * 3)]
    assert [outcome.waiting for outcome in waits] == [pytest.approx(1 / 101), pytest.approx(3 / 103)]
    assert simulate(plan, 2, costs, around, steps=3).millis.tolist() == pytest.approx([2.0] * 3)
    late = simulate(plan, 1, replace(costs, message=50_000.0), replace(around, deadline_ms=20.0), steps=3)
    assert late.late == 1
    assert late.waiting == pytest.approx((20 - 3 + (1 - SENDING)) / (117 + (1 - SENDING)))


def test_who_waits_too_long_goes_on_at_the_deadline() -> None:
    around = replace(EXACT, deadline_ms=5.0)
    outcome = simulate(Plan(gpus=4, step_ms=15), 1, replace(NOTHING, message=50_000.0), around, steps=3)
    assert outcome.late == 1
    assert outcome.waiting == pytest.approx(5 / 20)


def test_the_same_seed_gives_the_same_outcome() -> None:
    first, again, other = (simulate(PLAN, 5, Costs(), steps=10, seed=seed) for seed in (1, 1, 2))
    assert (first.millis == again.millis).all()  # as many, too
    assert first.millis[:8].tolist() != other.millis[:8].tolist()


def test_more_shards_never_need_less_cpu() -> None:
    needed = [PLAN.step_cores(Costs(), shards) for shards in range(1, 200)]
    assert needed == sorted(needed)
    each = Costs().message + Costs().background + PLAN.group_us(Costs())
    most = PLAN.gpus * PLAN.steps_per_second * PLAN.groups * each / 1e6
    assert needed[-1] < most
    assert needed[-1] == pytest.approx(most, rel=0.05)  # a message a problem, and no more


@pytest.mark.parametrize("shards", [2, 5, 40])
def test_messages_are_as_many_as_rendezvous_hashing_makes(shards: int) -> None:
    names = [f"shard-{i}" for i in range(shards)]
    problems = iter(range(10**6))
    owners = [
        {place(problem_digest("run", next(problems).to_bytes(4, "little")), names) for _ in range(PLAN.groups)}
        for _ in range(400)
    ]
    assert PLAN.messages(shards) == pytest.approx(np.mean([len(each) for each in owners]), rel=0.03)


# batch, siblings, drafted, messages; responses of an ingest
STEPS = [
    (1, 16, 8, 1, 16),
    (16, 16, 9, 1, 1),
    (16, 1, 10, 3, 1),
    (256, 16, 2, 2, 16),
    (256, 1, 11, 1, 16),
    (1024, 16, 5, 3, 1),
]


def test_what_a_rehearsal_takes_keeps_a_core_busy_and_no_step_waiting() -> None:
    plan = Plan(gpus=8)
    without, rehearsed = (
        simulate(plan, 1, replace(NOTHING, message=500.0, background=more), EXACT, steps=50) for more in (0.0, 500.0)
    )
    assert rehearsed.millis.tolist() == without.millis.tolist()
    assert rehearsed.busy.tolist() == without.busy.tolist()
    assert rehearsed.cores == pytest.approx(2 * without.cores)


def test_the_fit_finds_the_costs_that_made_the_measurements() -> None:
    costs, threads = Costs(300, 200, 20, 5, 0.7, 150, 200, 2, 400, 80, one_way=90), 2
    measured: list[dict[str, float]] = []
    for batch, siblings, drafted, messages, together in STEPS:
        plan = Plan(sequences=batch, siblings=min(batch, siblings), drafted=drafted)
        sessions = plan.groups * plan.group_us(costs) / 1e3
        server = messages * (costs.message + costs.background) / 1e3 + sessions
        client = (costs.client_step + messages * costs.client_message + batch * costs.client_session) / 1e3
        step: dict[str, float] = {
            "shards": 3,
            "workers": 2,
            "batch": batch,
            "siblings": siblings,
            "drafted_per_step": drafted,
            "steps": 9,
            "interval": 0.03,
        }
        step |= {"idle_cpu_ms_per_second": 4.0, "worker_steps_per_second": 30.0, "messages_per_step": messages}
        step |= {"answer_ms": 0.0, "step_p50_ms": 0.0}
        if messages == 1:
            step |= {"shards": 1, "workers": 1, "answer_ms": costs.message / 1e3 + sessions * divided(batch, threads)}
            step |= {"step_p50_ms": client + step["answer_ms"] + 2 * costs.one_way / 1e3}
        idle = 4.0 * step["shards"] / (step["worker_steps_per_second"] * step["workers"])
        step |= {"server_cpu_ms_per_step": server + idle, "client_cpu_ms_per_step": client}
        ingest: dict[str, float] = {"steps": 1, "length": 10 * batch, "responses": 16, "together": together}
        each = 1e3 * costs.call / (ingest["length"] * together) + costs.token
        measured += [step, ingest | {"ingest_cpu_ns_per_token": each}]
    warm = (0.4 * costs.message + costs.problem + costs.session + 8 * costs.drafted) / 1e3
    measured.append(measured[0] | {"interval": 0.0, "answer_ms": warm})
    fitted = fit(measured, threads)
    assert list(asdict(fitted.costs).values()) == pytest.approx(list(asdict(costs).values()))
    assert fitted.warm == pytest.approx(0.4)
    assert abs(fitted.steps).max() < 1e-9
    assert abs(fitted.answers).max() < 1e-9


def test_the_fewest_shards_are_enough_and_fewer_are_not() -> None:
    costs = replace(NOTHING, message=1000.0, session=400.0)
    shards, outcome = fewest_shards(FEW, costs)
    assert outcome.late < 0.01
    assert shards > 1
    assert tried(FEW, 1, costs).late > 0.01
    cheapest, better = cheapest_shards(FEW, (shards, outcome), costs, gpu_cores=50)
    assert cheapest + 50 * FEW.gpus * better.waiting <= shards + 50 * FEW.gpus * outcome.waiting


def test_a_deadline_that_no_shard_can_keep() -> None:
    with pytest.raises(ValueError, match=r"late: no number of shards keeps it under 1\.0%"):
        fewest_shards(Plan(gpus=2), Costs(), Surroundings(deadline_ms=0.01))


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--gpus", "2", "--sequences", "16", "--cell", "1"], 0, "cells of 1, lockstep, cheapest"),
        (["--gpus", "0"], 2, "--gpus: must be at least 1, is 0"),
        (["--step-ms", "-1"], 2, "--step-ms: must be above 0, is -1.0"),
        (["--costs", "old.json"], 1, "old.json: answer_ms: is missing; measure again"),
    ],
)
def test_the_program(options: list[str], code: int, said: str, tmp_path: Path) -> None:
    Path(tmp_path, "old.json").write_text('[{"steps": 9}]')
    command = [sys.executable, "-m", "benchmarks.scale.run", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": ROOT})
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
