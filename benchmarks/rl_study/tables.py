"""The tables of the study, in Markdown."""

from pathlib import Path

from benchmarks.rl_study.runs import Run, mean
from benchmarks.tables import table

PARTS = ("verification", "rollout", "assembly", "update", "other")
FIRST = 2  # the first epoch with earlier responses to draft from or to reuse
BY_EPOCH = (1, 2, 3, 7, 12)
LAST = 3  # how many last epochs give the reward at the end
REWARDS = ("reward, all epochs", "at the end", "held out")
BESIDE_COUPLED = ("HistoSpec", "SPEC-RL 1", "SPEC-RL e^0.5")
BESIDE_DRAFTER = ("none", "HistoSpec", "HistoSpec auto")
FRESH = "coupled 1"  # the method whose seeds are all new in each epoch
BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"


def insert(tables: str, page: Path) -> None:
    """Replaces the tables of the page."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{tables}{END}{after}")


def text(found: dict[str, list[Run]]) -> str:
    """Returns all tables."""
    tables = (work, time, repetition, by_epoch) if {"drafter", FRESH} & set(found) else (work, time, repetition)
    return "\n".join(of(found) for of in tables)


def work(found: dict[str, list[Run]]) -> str:
    """Returns the table of decoding work and rewards."""
    plain = {run.seed: run for run in found.get("none", [])}
    counted = ("decoding steps, k", "fewer", "generated tokens, k", "fewer", "reused", "accepted drafts")
    rows = []
    for method, runs in found.items():
        drafted = sum(run.total("drafted", FIRST) for run in runs)
        accepted = sum(run.total("accepted", FIRST) for run in runs)
        cells = [
            method,
            str(len(runs)),
            f"{mean(run.total('steps', FIRST) for run in runs)[0] / 1000:.1f}",
            _fewer("steps", runs, plain),
            f"{mean(run.total('generated', FIRST) for run in runs)[0] / 1000:.1f}",
            _fewer("generated", runs, plain),
            f"{sum(r.total('reused', FIRST) for r in runs) / sum(r.total('tokens', FIRST) for r in runs):.0%}",
            f"{accepted / drafted:.0%}" if drafted else "",
            *rewards(runs),
            f"{mean(run.curve('rouge_1')[1:].mean() for run in runs)[0]:.2f}",
        ]
        rows.append(cells)
    return table(("method", "seeds", *counted, *REWARDS, "overlap"), rows)


def time(found: dict[str, list[Run]]) -> str:
    """Returns the table of CPU seconds by part of an epoch."""
    names = [*PARTS, "all", "responses faster", "draft server"]
    rows = []
    plain = {run.seed: run for run in found.get("none", [])}
    for method, runs in found.items():
        parts = [mean(run.total(part, FIRST) for run in runs)[0] for part in PARTS]
        pairs = [(run, plain[run.seed]) for run in runs if run.seed in plain]
        faster = [b.total("rollout", FIRST) / _sampling(a) for a, b in pairs]
        served = mean(run.server_seconds for run in runs)[0]
        cells = [method, *(f"{p:.1f}" for p in (*parts, sum(parts))), _ratio(faster), f"{served:.1f}"]
        rows.append(cells)
    return table(("method", *names), rows)


def repetition(found: dict[str, list[Run]]) -> str:
    """Returns the table of coupled sampling: repetition and savings, compared with independent sampling."""
    independent = {run.seed: run for run in found.get("HistoSpec", [])}
    repeated = ("prefix of a last response", "like the last", "like its sibling")
    rows = []
    for method, runs in found.items():
        if method not in BESIDE_COUPLED and not method.startswith("coupled"):
            continue
        cells = [
            method,
            f"{mean(run.total('steps', FIRST) for run in runs)[0] / 1000:.1f}",
            _fewer("steps", runs, independent),
            *(f"{mean(run.curve(name)[1:].mean() for run in runs)[0]:.2f}" for name in ("prefix", "rouge_1", "alike")),
            *rewards(runs),
        ]
        rows.append(cells)
    return table(("method", "decoding steps, k", "fewer than HistoSpec", *repeated, *REWARDS), rows)


def by_epoch(found: dict[str, list[Run]]) -> str:
    """Returns the table of tokens per step and CPU time per token, by epoch: history, a draft model, fresh seeds."""
    epochs = len(next(iter(found.values()))[0].epochs)
    shown = [number for number in BY_EPOCH if number <= epochs]
    rows = []
    for method, runs in found.items():
        if method not in (*BESIDE_DRAFTER, FRESH) and "drafter" not in method:
            continue
        cells = [method]
        for name, digits in (("tokens_per_step", 2), ("microseconds", 0)):
            curves = [run.curve(name) for run in runs]
            cells += [f"{mean(curve[number - 1] for curve in curves)[0]:.{digits}f}" for number in shown]
            middle, half = mean(curve[FIRST - 1 :].mean() for curve in curves)
            cells.append(f"{middle:.{digits}f}" if half != half else f"{middle:.{digits}f} ± {half:.{digits}f}")
        rows.append(cells)
    head = [
        f"{what}, {when}"
        for what in ("tokens per step", "µs")
        for when in (*(f"epoch {n}" for n in shown), "from 2 on")
    ]
    return table(("method", *head), rows)


def rewards(runs: list[Run]) -> list[str]:
    """Returns the rewards over all epochs, at the end, and on held-out problems."""
    over_all = [run.curve("reward").mean() for run in runs]
    at_the_end = [run.curve("reward")[-LAST:].mean() for run in runs]
    return [_with_width(values) for values in (over_all, at_the_end, [run.held_out for run in runs])]


def _sampling(run: Run) -> float:
    """Returns the seconds from prompts to responses, over all parts."""
    return sum(run.total(part, FIRST) for part in ("verification", "rollout", "assembly"))


def _fewer(what: str, runs: list[Run], others: dict[int, Run]) -> str:
    """Returns how many times fewer than in other runs of the same seeds; "" if some run has none."""
    pairs = [(run.total(what, FIRST), others[run.seed].total(what, FIRST)) for run in runs if run.seed in others]
    return _ratio([most / less for less, most in pairs]) if all(less for less, _ in pairs) else ""


def _ratio(values: list[float]) -> str:
    return f"{mean(values)[0]:.2f}x" if values else ""


def _with_width(values: list[float]) -> str:
    middle, half = mean(values)
    return f"{middle:.3f}" if half != half else f"{middle:.3f} ± {half:.3f}"
