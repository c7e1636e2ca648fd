"""The tables of the study, in Markdown."""

from pathlib import Path

from runs import Run, mean

PARTS = ("verification", "rollout", "assembly", "update", "other")
FIRST = 2  # the epoch from which there is something to draft from, or to reuse
LAST = 3  # so many epochs' rewards are the reward at the end
BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"


def insert(tables: str, page: Path) -> None:
    """Puts the tables in the place of those that the page has."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{tables}{END}{after}")


def text(found: dict[str, list[Run]]) -> str:
    """Both tables."""
    return f"{work(found)}\n{time(found)}"


def work(found: dict[str, list[Run]]) -> str:
    """What was decoded, and what was learned."""
    plain = {run.seed: run for run in found.get("none", [])}
    lines = [
        "| method | seeds | decoding steps, k | fewer | generated tokens, k | fewer | reused | accepted drafts "
        "| reward, all epochs | at the end | held out | overlap |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
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
            _with_width([run.curve("reward").mean() for run in runs]),
            _with_width([run.curve("reward")[-LAST:].mean() for run in runs]),
            _with_width([run.held_out for run in runs]),
            f"{mean(run.curve('rouge_1')[1:].mean() for run in runs)[0]:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def time(found: dict[str, list[Run]]) -> str:
    """Where the CPU seconds went."""
    names = [*PARTS, "all", "responses faster", "draft server"]
    lines = [f"| method | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    plain = {run.seed: run for run in found.get("none", [])}
    for method, runs in found.items():
        parts = [mean(run.total(part, FIRST) for run in runs)[0] for part in PARTS]
        pairs = [(run, plain[run.seed]) for run in runs if run.seed in plain]
        faster = [b.total("rollout", FIRST) / _sampling(a) for a, b in pairs]
        served = mean(run.server_seconds for run in runs)[0]
        cells = [method, *(f"{p:.1f}" for p in (*parts, sum(parts))), _ratio(faster), f"{served:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _sampling(run: Run) -> float:
    """Seconds from prompts to responses, whatever they went into."""
    return sum(run.total(part, FIRST) for part in ("verification", "rollout", "assembly"))


def _fewer(what: str, runs: list[Run], plain: dict[int, Run]) -> str:
    """How many times fewer than without anything; nothing where there were none."""
    pairs = [(run.total(what, FIRST), plain[run.seed].total(what, FIRST)) for run in runs if run.seed in plain]
    return _ratio([most / less for less, most in pairs]) if all(less for less, _ in pairs) else ""


def _ratio(values: list[float]) -> str:
    return f"{mean(values)[0]:.2f}x" if values else ""


def _with_width(values: list[float]) -> str:
    middle, half = mean(values)
    return f"{middle:.3f}" if half != half else f"{middle:.3f} ± {half:.3f}"
