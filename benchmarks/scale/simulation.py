"""A discrete-event simulation of steps with many workers and shards, to find how many steps miss their deadline.

A worker decodes, sends one message to each shard that owns a problem of its batch, and does vLLM's bookkeeping. It
continues when the slowest shard has answered, or at the deadline, so it waits for what the bookkeeping does not hide. A
shard is one event loop that serves one message after the other, in order of arrival. Therefore the end of a message is
known when it arrives, and one event per message and step is enough: a heap.
simpy needs several events and generators per message, and takes nine times as long.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.scale.model import Costs, Plan, divided

NOISE = 1 << 16  # how many random numbers are drawn beforehand; they are used repeatedly
WARM = 5  # about how many steps of each worker do not count
SENDING = 0.6  # share of a worker's own time before its messages leave


@dataclass(frozen=True)
class Surroundings:
    """The conditions besides the costs.

    Attributes:
        deadline_ms: deadline of a step.
        network_ms, jitter_ms: network latency one way, in addition to `Costs.one_way`: the minimum, and the mean of an
            exponential addition.
        service_spread: standard deviation of the logarithm of a message's service time. 0.2 makes the 99th percentile
            1.6 times the median, as docs/benchmarks.md has it.
        decode_spread: standard deviation of a decoding step, relative to its mean; a gamma distribution.
        lockstep: whether all workers start their steps together, as the data-parallel ranks of one engine do.
        threads: with how many threads a shard drafts (`--threads`).
        warm: how much of a message's fixed cost is left if it arrives while the shard is busy, whose caches then hold
            what a message needs.
        cores: how many cores workers and shards share; None: each has enough of its own.
        in_vllm: whether the workers are engines of vLLM; False: clients alone, as those of `histospec bench`.

    """

    deadline_ms: float = 20.0
    network_ms: float = 0.1
    jitter_ms: float = 0.05
    service_spread: float = 0.2
    decode_spread: float = 0.05
    lockstep: bool = False
    threads: int = 2
    warm: float = 0.49
    cores: int | None = None
    in_vllm: bool = True


@dataclass(frozen=True)
class Outcome:
    """The results of a simulation.

    Attributes:
        millis: float64[steps of all workers], the time that drafts add to each step.
        late: share of the steps that missed the deadline.
        waiting: share of the workers' time in which they waited for drafts.
        busy: float64[shards], share of the time in which the event loop of each shard was busy.
        cores: cores that the steps kept busy, of all shards together.

    """

    millis: npt.NDArray[np.float64]
    late: float
    waiting: float
    busy: npt.NDArray[np.float64]
    cores: float

    def percentile(self, percent: float) -> float:
        """Of `millis`."""
        return float(np.percentile(self.millis, percent))


def simulate(
    plan: Plan, shards: int, costs: Costs, around: Surroundings | None = None, steps: int = 50, seed: int = 0
) -> Outcome:
    """Simulates the time of `steps` decoding steps, after some to warm up. The same seed gives the same outcome.

    Problems are assigned to shards uniformly at random, as by rendezvous hashing.
    """
    around = around or Surroundings()
    rng = np.random.default_rng(seed)
    work = _work(plan, shards, costs, around, rng)
    # Lists, because access to single numbers of an array is slow.
    noise = rng.lognormal(-(around.service_spread**2) / 2, around.service_spread, NOISE).tolist()
    way = (costs.one_way / 1e3 + around.network_ms + rng.exponential(around.jitter_ms, NOISE)).tolist()
    decode = _decode(plan.step_ms, around.decode_spread, rng)
    own = [costs.own_us(plan.sequences, len(each), around.in_vllm) / 1e3 for each in work]
    hidden = costs.hidden_us(plan.sequences) / 1e3 if around.in_vllm else 0.0
    at = 0

    sent, left, done, pending, late = [0.0] * plan.gpus, [0.0] * plan.gpus, [0.0] * plan.gpus, [0] * plan.gpus, 0
    free, served, spent = [0.0] * shards, [0.0] * shards, 0.0
    saved = (1 - around.warm) * costs.message / 1e3
    cores = [0.0] * (around.cores or 0)  # a heap: when each core is free
    begin, end = WARM * plan.step_ms, (WARM + steps) * plan.step_ms
    waited = decoded = 0.0
    found: list[float] = []
    together: list[float] = []  # in lockstep: when each waiting worker became ready
    # The time, a worker, and a message that arrives: shard, and milliseconds of service and of CPU. The worker sends
    # its messages if there is no shard.
    events: list[tuple[float, int, int, float, float]] = []

    def step(worker: int, now: float) -> None:
        heapq.heappush(events, (now, worker, -1, 0.0, 0.0))

    def goes_on(worker: int, answered: float) -> float:
        """Returns when a worker goes on that has its last answer at this time, without vLLM's bookkeeping."""
        return max(answered - hidden, left[worker]) + (1 - SENDING) * own[worker]

    def work_from(earliest: float, millis: float) -> float:
        """Returns when work of `millis` CPU begins, and keeps a core busy with it."""
        if not cores:
            return earliest
        start = max(earliest, cores[0])
        heapq.heapreplace(cores, start + millis)
        return start

    for worker, start in enumerate((rng.random(plan.gpus) * plan.step_ms * (not around.lockstep)).tolist()):
        step(worker, start)
    while events:
        now, worker, shard, millis, cpu = heapq.heappop(events)
        if shard < 0:
            sent[worker], done[worker], pending[worker] = now, now, len(work[worker])
            left[worker] = leaves = work_from(now, SENDING * own[worker]) + SENDING * own[worker]
            for shard, millis, cpu in work[worker]:
                at = (at + 1) % NOISE
                heapq.heappush(events, (leaves + way[at], worker, shard, millis * noise[at], cpu * noise[at]))
            continue
        if free[shard] > now:
            millis, cpu = millis - saved, cpu - saved
        free[shard] = work_from(max(free[shard], now), cpu) + millis
        served[shard] += max(0.0, min(end, free[shard]) - max(begin, free[shard] - millis))
        spent += cpu * (begin <= now < end)
        at = (at + 1) % NOISE
        done[worker] = max(done[worker], free[shard] + way[at])
        pending[worker] -= 1
        if pending[worker]:
            continue
        deadline = sent[worker] + around.deadline_ms
        if sent[worker] >= begin:
            found.append(goes_on(worker, done[worker]) - sent[worker])
            late += done[worker] > deadline
        ready = goes_on(worker, min(done[worker], deadline))
        together.append(ready)
        if around.lockstep and len(together) < plan.gpus:
            continue
        for each in range(plan.gpus) if around.lockstep else (worker,):
            start = max(together)
            waited, decoded = waited + start - sent[each], decoded + decode[at]
            if start + decode[at] < end:
                step(each, start + decode[at])
        together.clear()
    millis_found = np.array(found)
    busy = np.array(served) / (end - begin)
    return Outcome(millis_found, late / len(found), waited / (waited + decoded), busy, spent / (end - begin))


def _work(
    plan: Plan, shards: int, costs: Costs, around: Surroundings, rng: np.random.Generator
) -> list[list[tuple[int, float, float]]]:
    """Returns for each worker (shard, milliseconds of service and of CPU) of each message of its steps."""
    owners = rng.integers(shards, size=(plan.gpus, plan.groups))
    each = plan.sequences / plan.groups
    work = []
    for row in owners:
        touched, groups = np.unique(row, return_counts=True)
        sessions = groups * plan.group_us(costs)
        faster = np.array([divided(number, around.threads) for number in groups * each])
        service = (costs.message + sessions * faster) / 1e3
        cpu = (costs.message + costs.background + sessions) / 1e3
        work.append(list(zip(touched.tolist(), service.tolist(), cpu.tolist(), strict=True)))
    return work


def _decode(mean: float, spread: float, rng: np.random.Generator) -> list[float]:
    if not spread:
        return [mean] * NOISE
    times: list[float] = rng.gamma(spread**-2, mean * spread**2, NOISE).tolist()
    return times


def tried(
    plan: Plan, shards: int, costs: Costs, around: Surroundings | None = None, seeds: Sequence[int] = (0, 1, 2)
) -> Outcome:
    """Returns the worst outcome of several random placements of the problems."""
    steps = max(20, min(200, 10_000 // plan.gpus))
    outcomes = (simulate(plan, shards, costs, around, steps, seed) for seed in seeds[: max(1, 3_000 // plan.gpus)])
    return max(outcomes, key=lambda outcome: (outcome.late, outcome.waiting))


def fewest_shards(
    plan: Plan, costs: Costs, around: Surroundings | None = None, late: float = 0.01
) -> tuple[int, Outcome]:
    """Returns the smallest number of shards, within 5 %, with which fewer steps than `late` miss the deadline.

    Raises:
        ValueError: there is no such number.
    """
    # The load is lowest if workers wait until the deadline in every step; the shards must at least serve that load.
    slowest = plan.step_ms / (plan.step_ms + (around or Surroundings()).deadline_ms)
    least = max(1, math.floor(slowest * plan.step_cores(costs, 1)))
    least = enough = max(1, math.floor(slowest * plan.step_cores(costs, least)))
    while (outcome := tried(plan, enough, costs, around)).late >= late:
        least, enough = enough + 1, max(enough + 1, enough * 5 // 4)
        if enough > 4 * plan.gpus * plan.groups:
            raise ValueError(f"late: no number of shards keeps it under {late:.1%}")
    while least < enough - enough // 20:
        middle = (least + enough) // 2
        found = tried(plan, middle, costs, around)
        if found.late < late:
            enough, outcome = middle, found
        else:
            least = middle + 1
    return enough, outcome


def cheapest_shards(
    plan: Plan, fewest: tuple[int, Outcome], costs: Costs, gpu_cores: float, around: Surroundings | None = None
) -> tuple[int, Outcome]:
    """Returns the cheapest number of shards, counting a core per shard and the GPU time spent waiting.

    It tries numbers in steps of a fifth, from the fewest on.

    Args:
        plan, costs, around: as for `simulate`.
        fewest: result of fewest_shards().
        gpu_cores: how many cores cost as much as a GPU.

    """

    def cost(found: tuple[int, Outcome]) -> float:
        return found[0] + gpu_cores * plan.gpus * found[1].waiting

    best, (shards, _), worse = fewest, fewest, 0
    while worse < 3 and shards < plan.gpus * plan.groups:
        shards = max(shards + 1, shards * 6 // 5)
        found = shards, tried(plan, shards, costs, around)
        if cost(found) < cost(best):
            best, worse = found, 0
        else:
            worse += 1
    return best
