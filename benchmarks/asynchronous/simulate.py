"""How long a GPU waits for drafts, by the way they reach it: `python -m benchmarks.asynchronous.simulate`.

A simulation of one engine: a host, a device that takes its steps in order, and a draft server. No time here is measured
by this program. The step and the server's answer are measured elsewhere (docs/benchmarks.md); what the host does is
assumed, and given on the command line. A GPU has to show whether the assumptions hold.

    V1, V2 sync    outcome on the host ─► send ─► vLLM's bookkeeping ─► drafts ─► schedule ─► prepare ─► next step
    V2 block       bookkeeping and scheduling run during the step; outcome ─► send ─► drafts ─► prepare ─► next step
    stream-ordered the next step is prepared, too, and waits on the device: outcome ─► send ─► drafts ─► flag ─► step
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

SPREAD = 0.2  # standard deviation of the logarithm of each time


@dataclass(frozen=True)
class Times:
    """Times in milliseconds.

    Attributes:
        step: the device computes a step.
        copy: the outcome of a step reaches the host.
        send: the client writes a message.
        answer: the server's answer arrives after that.
        take: the client reads the drafts.
        update: vLLM's bookkeeping after a step.
        schedule: vLLM schedules a step.
        prepare: vLLM prepares a step and launches it; `prepare_v1`: with model runner V1.
        flag: the host's flag reaches a device that waits for it.
        deadline: the client waits no longer.
    """

    step: float = 30.0
    copy: float = 0.05
    send: float = 0.2
    answer: float = 4.5
    take: float = 0.2
    update: float = 2.0
    schedule: float = 1.0
    prepare: float = 1.0
    prepare_v1: float = 3.0
    flag: float = 0.02
    deadline: float = 20.0


class Device:
    """Takes steps in order; counts how long it had none."""

    def __init__(self) -> None:
        self.free = self.idle = 0.0

    def run(self, ready: float, seconds: float) -> float:
        """Runs a step that is ready at a time. Returns its end."""
        start = max(ready, self.free)
        self.idle += start - self.free
        self.free = start + seconds
        return self.free


Draw = Callable[[str], float]
"""Draws a time by its name in `Times`."""


def synchronous(draw: Draw, steps: int, prepare: str = "prepare", drafts: bool = True) -> Device:
    """Runs steps with synchronous scheduling."""
    device, now = Device(), 0.0
    for _ in range(steps):
        now = device.run(now + draw("schedule") + draw(prepare), draw("step")) + draw("copy")
        sent = now + draw("send") * drafts
        now = sent + draw("update")
        if drafts:
            now = max(now, arrival(draw, sent)) + draw("take")
    return device


def blocking(draw: Draw, steps: int, drafts: bool = True) -> Device:
    """Runs steps with asynchronous scheduling; the host waits for the drafts before it prepares a step."""
    device, now, copied = Device(), 0.0, 0.0
    for _ in range(steps):
        if drafts:
            sent = max(now, copied) + draw("send")
            now = arrival(draw, sent) + draw("take")
        now += draw("prepare")
        step = draw("step")
        end = device.run(now, step)
        copied = end + draw("copy")
        if not drafts:  # the host is at most a step ahead
            now = max(now, end - step)
        now += draw("update") + draw("schedule")  # the outcome of the step before, and the next step
    return device


def stream_ordered(draw: Draw, steps: int) -> Device:
    """Runs steps with asynchronous scheduling; the device waits for the drafts of a step that is prepared."""
    device, now, copied = Device(), 0.0, 0.0
    for _ in range(steps):
        now += draw("schedule") + draw("prepare")  # the host, ahead of the device
        sent = copied + draw("send")  # another thread
        flag = arrival(draw, sent) + draw("take") + draw("flag")
        before, copied = copied, device.run(max(now, flag), draw("step")) + draw("copy")
        now = max(now, before) + draw("update")
    return device


def arrival(draw: Draw, sent: float) -> float:
    """Returns when the host has the drafts, or stops waiting."""
    return sent + min(draw("answer"), draw("deadline"))


WAYS: dict[str, Callable[[Draw, int], Device]] = {
    "asynchronous, no drafts": lambda draw, steps: blocking(draw, steps, drafts=False),
    "V2 synchronous, no drafts": lambda draw, steps: synchronous(draw, steps, drafts=False),
    "V1": lambda draw, steps: synchronous(draw, steps, "prepare_v1"),
    "V2 synchronous": synchronous,
    "V2 blocking": blocking,
    "stream-ordered": stream_ordered,
}


def waits(times: Times, steps: int, seed: int = 1) -> dict[str, float]:
    """Returns for each way how long the device waits per step, in milliseconds."""
    found = {}
    for name, way in WAYS.items():
        noise = np.random.default_rng(seed)

        def draw(what: str, noise: np.random.Generator = noise) -> float:
            value: float = getattr(times, what)
            return value if what == "deadline" else value * float(np.exp(SPREAD * noise.standard_normal()))

        found[name] = way(draw, steps).idle / steps
    return found


def main() -> None:
    """Prints a table in Markdown: the waits by way, for several answers of the server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Times()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=value, help=f"ms; default {value:g}")
    parser.add_argument("--answers", type=float, nargs="+", default=[0.5, 2.0, 4.5, 10.0], help="ms, a column for each")
    parser.add_argument("--steps", type=int, default=5000)
    arguments = parser.parse_args()
    times = Times(**{name: getattr(arguments, name) for name in vars(Times())})
    columns = [waits(replace(times, answer=answer), arguments.steps) for answer in arguments.answers]
    print(
        f"| wait per step of {times.step:g} ms, by the answer | {' | '.join(f'{a:g} ms' for a in arguments.answers)} |"
    )
    print("|---|" + "---|" * len(columns))
    for name in WAYS:
        cells = [f"{column[name]:.1f} ({column[name] / (column[name] + times.step):.0%})" for column in columns]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
