"""A cost model of steps and ingests, fitted to measurements, and its predictions for a deployment."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Figures = dict[str, float]
Floats = npt.NDArray[np.float64]

SHARED = 32  # sessions of a message from which on a shard drafts with all of its threads
PARALLEL = 0.78  # share of the sessions' time that threads divide, as benchmarks/engine/threads.py measures it


@dataclass(frozen=True)
class Costs:
    """What steps and ingests cost. The defaults were fitted on two cores of an Intel Xeon; docs/scale.md says how well.

    Attributes:
        message, problem, session, drafted: CPU microseconds of a shard's event loop for a step: per message, per
            problem of its sessions, per session, and per drafted token. Meanwhile other messages wait.
        background: further CPU microseconds of a shard per message, for which no step waits: gRPC's threads, and the
            rehearsal in the pause.
        client_step, client_message, client_session: CPU microseconds of a worker for a step, of the client alone: once,
            per message, and per session.
        call, token: CPU time of a shard for an ingest: microseconds per call, and nanoseconds per token.
        one_way: latency of a message in microseconds, each way, between a worker and a shard on one machine.
        adapter_step, adapter_message, adapter_session: CPU microseconds of HistoSpec between two steps of vLLM, the
            client included: once, with one message; per further message; and per session. `benchmarks/vllm/waits.py`
            measures these and the next two.
        hidden_step, hidden_session: microseconds of vLLM's bookkeeping after the messages have left: once, and per
            session. A step has it anyway, so a worker does not wait for answers that arrive meanwhile.

    """

    message: float = 291.0
    background: float = 658.0
    problem: float = 4.8
    session: float = 3.1
    drafted: float = 2.3
    client_step: float = 377.0
    client_message: float = 241.0
    client_session: float = 1.8
    call: float = 2068.0
    token: float = 154.0
    one_way: float = 122.0
    adapter_step: float = 688.0
    adapter_message: float = 274.0
    adapter_session: float = 1.3
    hidden_step: float = 148.0
    hidden_session: float = 6.5

    def own_us(self, sequences: int, messages: float, in_vllm: bool) -> float:
        """Returns the CPU microseconds of a worker for a step: in vLLM, or of the client alone."""
        if in_vllm:
            return self.adapter_step + (messages - 1) * self.adapter_message + sequences * self.adapter_session
        return self.client_step + messages * self.client_message + sequences * self.client_session

    def hidden_us(self, sequences: int) -> float:
        """Returns the microseconds of vLLM's bookkeeping while the answers are on their way."""
        return self.hidden_step + sequences * self.hidden_session


@dataclass(frozen=True)
class Fit:
    """Costs, and their relative errors, one per measurement, in the order of the measurements.

    Attributes:
        costs: the costs.
        steps: the errors of the shards' CPU time of a step.
        answers: those of the time in which a shard answers the step of a worker that is alone.
        clients, ingests: those of a worker's CPU time of a step, and of a shard's for an ingested token.
        warm: which part of `Costs.message` is left without a pause between two messages.

    """

    costs: Costs
    steps: Floats
    answers: Floats
    clients: Floats
    ingests: Floats
    warm: float


def fit(measured: Sequence[Figures], threads: int) -> Fit:
    """Fits the costs by least squares of the relative errors.

    `measured` is the result of measure.measure(); its shards have so many threads. The CPU time of a shard has all that
    it does for a step. The time to its answers has what a step waits for; it counts where nothing else uses the cores.
    """
    steps = paused_steps(measured)
    alone = [m for m in steps if m["workers"] == m["shards"] == 1]
    ingests = [m for m in measured if m["steps"] == 1]
    idle = [m["idle_cpu_ms_per_second"] * m["shards"] / (m["worker_steps_per_second"] * m["workers"]) for m in steps]
    rows = [[m["messages_per_step"], m["messages_per_step"], *_sessions(m)] for m in steps]
    rows += [[1.0, 0.0, *(divided(m["batch"], threads) * each for each in _sessions(m))] for m in alone]
    server = [1e3 * (m["server_cpu_ms_per_step"] - i) for m, i in zip(steps, idle, strict=True)]
    shard, off = _least_squares(rows, server + [1e3 * m["answer_ms"] for m in alone])
    client, client_off = _least_squares(
        [[1.0, m["messages_per_step"], m["batch"]] for m in steps], [1e3 * m["client_cpu_ms_per_step"] for m in steps]
    )
    latencies = [1e3 * (m["step_p50_ms"] - m["client_cpu_ms_per_step"] - m["answer_ms"]) / 2 for m in alone]
    calls = [[1e3 / (m["length"] * min(m["together"], m["responses"])), 1.0] for m in ingests]
    ingest, ingest_off = _least_squares(calls, [m["ingest_cpu_ns_per_token"] for m in ingests])
    costs = Costs(*[*shard, *client, *ingest, float(np.median(latencies))])
    (busy,) = (m for m in measured if m["steps"] > 1 and not m["interval"])
    warm = (1e3 * busy["answer_ms"] - float(np.dot(_sessions(busy), shard[2:]))) / costs.message
    return Fit(costs, off[: len(steps)], off[len(steps) :], client_off, ingest_off, warm)


def paused_steps(measured: Sequence[Figures]) -> list[Figures]:
    """Returns the measurements of steps with pauses, to which the costs of a step are fitted."""
    return [m for m in measured if m["steps"] > 1 and m["interval"]]


def _sessions(m: Figures) -> list[float]:
    """Returns how often a step costs `problem`, `session` and `drafted`."""
    return [max(1.0, m["batch"] / m["siblings"]), m["batch"], m["batch"] * m["drafted_per_step"]]


def divided(sessions: float, threads: int) -> float:
    """Returns which part of the CPU time of a message's sessions the shard is busy with it."""
    return 1 - PARALLEL * (1 - 1 / threads) if sessions >= SHARED else 1.0


def _least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> tuple[list[float], Floats]:
    """Returns the coefficients, and the relative errors of their predictions."""
    scaled = np.array(rows) / np.array(values)[:, None]
    found: Floats = np.linalg.lstsq(scaled, np.ones(len(values)), rcond=None)[0]
    coefficients: list[float] = found.tolist()
    return coefficients, scaled @ found - 1


@dataclass(frozen=True)
class Plan:
    """The load of a deployment.

    Attributes:
        gpus: number of workers, each with an engine of its own.
        sequences: sequences that each decodes at once, which are the sessions of a step.
        siblings: sequences per problem.
        step_ms: time of a decoding step, without waiting for drafts.
        generated, drafted: tokens per session and step.
        prompt, length: tokens of a prompt and of a response.
        problems, samples, epochs: problems of the data set, responses per problem and epoch, and kept epochs.
        bytes_per_token: bytes of the index per token; benchmarks/engine/compare.py measures it.

    """

    gpus: int = 10
    sequences: int = 256
    siblings: int = 16
    step_ms: float = 30.0
    generated: float = 3.0
    drafted: float = 5.5
    prompt: int = 500
    length: int = 2000
    problems: int = 1000
    samples: int = 16
    epochs: int = 8
    bytes_per_token: float = 11.6

    def __post_init__(self) -> None:
        for name in ("gpus", "sequences", "siblings", "step_ms", "length", "problems", "samples", "epochs"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: must be above 0, is {getattr(self, name)}")

    @property
    def groups(self) -> int:
        """Returns the number of problems in a worker's batch."""
        return math.ceil(self.sequences / self.siblings)

    @property
    def steps_per_second(self) -> float:
        """Returns the steps per second of one worker, without the time that it waits for drafts."""
        return 1e3 / self.step_ms

    def messages(self, shards: int) -> float:
        """Returns the messages of one worker's step: the number of shards that own a problem of its batch."""
        return float(shards * -math.expm1(self.groups * math.log1p(-1 / shards))) if shards > 1 else 1.0

    def step_us(self, costs: Costs, shards: int) -> float:
        """Returns the CPU microseconds of all shards together for one worker's step."""
        return self.messages(shards) * (costs.message + costs.background) + self.groups * self.group_us(costs)

    def group_us(self, costs: Costs) -> float:
        """Returns the CPU microseconds that the sessions of one problem add to a message."""
        return costs.problem + self.sequences / self.groups * (costs.session + self.drafted * costs.drafted)

    def responses_per_second(self) -> float:
        """Returns the responses per second that all workers finish."""
        return self.gpus * self.steps_per_second * self.sequences * self.generated / self.length

    def step_cores(self, costs: Costs, shards: int) -> float:
        """Returns how many cores steps keep busy if no worker waits for a shard."""
        return self.gpus * self.steps_per_second * self.step_us(costs, shards) / 1e6

    def ingest_cores(self, costs: Costs) -> float:
        """Returns how many cores finished responses keep busy, as one call each, which costs more than commits."""
        return self.responses_per_second() * (1e3 * costs.call + self.length * costs.token) / 1e9

    def network(self, shards: int) -> tuple[float, float]:
        """Returns the bytes per second to and from all shards: the fields of protos/, and 100 bytes per message."""
        rate, framing = self.gpus * self.steps_per_second, 100 * self.messages(shards)
        sent = framing + self.sequences * (8 + 4 + 4 + 4 * self.generated)
        received = framing + self.sequences * (4 + (4 + 4) * self.drafted)
        return rate * sent + self.responses_per_second() * 4 * self.prompt, rate * received

    def memory(self) -> float:
        """Returns the bytes of the index of all shards together, with all kept epochs."""
        return self.bytes_per_token * self.tokens()

    def tokens(self) -> int:
        """Returns the tokens of the whole history."""
        return self.problems * self.samples * self.epochs * self.length
