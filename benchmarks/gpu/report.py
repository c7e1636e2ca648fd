"""Makes the tables and plots of the GPU measurements from the results so far."""

from collections.abc import Iterator
from pathlib import Path
from statistics import median

from matplotlib.figure import Figure

from benchmarks.gpu import cost as gpu_cost
from benchmarks.gpu import overhead as gpu_overhead
from benchmarks.gpu import speedup as gpu_speedup
from benchmarks.gpu.results import Results, Row
from benchmarks.plotting import finish, style, titled
from benchmarks.tables import table

COLORS = ("#1b6ca8", "#e07a1f", "#4d8b57", "#8a95a1", "#a23b72", "#6a4c93")


def write(folder: Path, dry: bool) -> None:
    """Writes gpu.md, and a plot for each part with results."""
    texts = ["# One GPU" + (": a dry run on a CPU, these figures mean nothing" if dry else "")]
    for part, (tables, plot) in PARTS.items():
        results = Results(folder, part, dry)
        if results.rows:
            machines = sorted({row["machine"] for row in results.rows})
            texts += [
                f"## {part}",
                "; ".join(machines),
                *(text.rstrip() for text in tables(results)),
                f"![{part}]({part}.png)",
            ]
            with style():
                figure = plot(results)
                for axes in figure.axes:
                    finish(axes)
                figure.savefig(folder / f"{part}.png", dpi=150)
    (folder / "gpu.md").write_text("\n\n".join(texts) + "\n")


def _texts(results: Results, key: str) -> list[str]:
    """Returns the distinct values of a key, in the order of the measurements."""
    return list(dict.fromkeys(row[key] for row in results.rows if key in row))


def _numbers(results: Results, key: str) -> list[int]:
    """Returns the distinct values of a key, sorted."""
    return sorted({row[key] for row in results.rows if key in row})


def _curves(results: Results) -> Iterator[tuple[str, str, int, dict[int, float], float]]:
    """Yields model, engine, batch, seconds of a step by length, and seconds of a plain step, if both were measured."""
    for row in sorted(results.rows, key=lambda row: row["batch"]):
        plain = results.find(model=row["model"], engine=gpu_cost.PLAIN, batch=row["batch"])
        if plain and "seconds" in plain and "seconds" in row and not row["engine"].startswith(gpu_cost.PLAIN):
            seconds = {int(k): each for k, each in row["seconds"].items()}
            yield row["model"], row["engine"], row["batch"], seconds, plain["seconds"]["0"]


def cost_tables(results: Results) -> list[str]:
    """Returns two tables: milliseconds per step, and the cost of a drafted token."""
    lengths, rows, costs = gpu_cost.LENGTHS, [], []
    for row in sorted(results.rows, key=lambda row: (row["model"], row["batch"])):
        cells = [row["skipped"]] if "skipped" in row else []
        if not cells:
            cells = [f"{1e3 * row['seconds'][str(k)]:.2f}" if str(k) in row["seconds"] else "" for k in lengths]
        rows.append([row["model"], str(row["batch"]), row["engine"], *cells, *[""] * (len(lengths) - len(cells))])
    for model, engine, batch, seconds, plain in _curves(results):
        shares = gpu_cost.verify_cost(seconds, plain), gpu_cost.marginal_cost(seconds, plain)
        cells = [f"{shares[0][k]:.3f}, {shares[1][k]:.3f}" for k in lengths[1:]]
        costs.append([model, engine, str(batch), f"{seconds[0] / plain:.3f}", *cells])
    return [
        "Milliseconds a step, by drafted tokens a sequence:",
        table(["model", "batch", "engine", *map(str, lengths)], rows),
        "A step without drafts beside one without speculation; then the cost of a drafted token in plain steps, of "
        "the whole draft and of what it is longer than the one before:",
        table(["model", "engine", "batch", "no drafts", *map(str, lengths[1:])], sorted(costs, key=lambda row: row[0])),
    ]


def cost_plot(results: Results) -> Figure:
    """Plots the cost of a drafted token over the length of the draft: one panel per model, one line per batch."""
    models, batches = _texts(results, "model"), _numbers(results, "batch")
    figure = titled("What verifying a drafted token costs", 6.5 * len(models), 4.6)
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        for of, engine, batch, seconds, plain in _curves(results):
            if of == model:
                costs = gpu_cost.verify_cost(seconds, plain)
                whole = engine == gpu_cost.DRAFTS
                axes.plot(
                    list(costs),
                    list(costs.values()),
                    marker="o",
                    markersize=4,
                    color=COLORS[batches.index(batch) % len(COLORS)],
                    linestyle="-" if whole else ":",
                    label=f"batch {batch}" if whole else None,
                )
        axes.axhline(0, color="#8a95a1", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks(gpu_cost.LENGTHS[1:], [str(k) for k in gpu_cost.LENGTHS[1:]])
        axes.set_title(f"{model}; dotted: CUDA graphs for all sizes")
        axes.set_xlabel("drafted tokens a sequence")
        axes.set_ylabel("plain steps a drafted token")
        axes.legend(frameon=False)
    return figure


def overhead_tables(results: Results) -> list[str]:
    """Returns a table with one row per batch and method."""
    rows = []
    for row in sorted(results.rows, key=lambda row: row["batch"]):
        cells = [str(row["batch"]), row["method"]]
        if "skipped" in row:
            rows.append([*cells, row["skipped"], "", "", "", ""])
            continue
        none = results.find(method=gpu_overhead.NONE, batch=row["batch"])
        beside = f"{row['seconds'] / none['seconds']:.3f}" if none else ""
        times = [f"{1e3 * row['seconds']:.3f}", beside, f"{1e3 * row['inside']:.3f}"]
        rows.append([*cells, *times, f"{row['drafted']:.2f}", f"{row['gained']:.2f}"])
    head = ["batch", "method", "ms a step", "beside none", "ms in its calls", "drafted a step", "tokens a step"]
    return [table(head, rows)]


def overhead_plot(results: Results) -> Figure:
    """Plots the milliseconds beyond the plain step, by batch and method; the darker part passed in its calls."""
    batches = [row["batch"] for row in results.rows if row["method"] == gpu_overhead.NONE and "seconds" in row]
    methods = [name for name in _texts(results, "method") if name != gpu_overhead.NONE]
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    axes, width = figure.subplots(), 0.8 / max(len(methods), 1)
    for i, method in enumerate(methods):
        for place, batch in enumerate(batches):
            row = results.find(method=method, batch=batch)
            none = results.find(method=gpu_overhead.NONE, batch=batch)
            if row and none and "seconds" in row:
                x = place - 0.4 + (i + 0.5) * width
                more = 1e3 * (row["seconds"] - none["seconds"])
                color = COLORS[i % len(COLORS)]
                axes.bar(x, more, width * 0.9, color=color, alpha=0.4, label=method if batch == batches[0] else None)
                axes.bar(x, 1e3 * row["inside"], width * 0.45, color=color)
    axes.axhline(0, color="#8a95a1", linewidth=1)
    axes.set_xticks(range(len(batches)), [f"batch {batch}" for batch in batches])
    axes.set_ylabel("ms a step more than without speculation")
    axes.set_title("What drafting adds to a step, verifying included; narrow: within the drafter's calls")
    axes.legend(frameon=False)
    return figure


def speedup_tables(results: Results) -> list[str]:
    """Returns a table with one row per concurrency and method, for epochs 2 and later."""
    rows = []
    for concurrency in _numbers(results, "concurrency"):
        for method in gpu_speedup.METHODS:
            epochs = _later(results, method, concurrency)
            if epochs:
                total = {key: sum(row[key] for row in epochs) for key in ("seconds", "steps", "engine_steps", "tokens")}
                faster = [times for epoch, times in _faster(results, method, concurrency).items() if epoch > 1]
                rows.append(
                    [
                        str(concurrency),
                        method,
                        f"{total['seconds']:.2f}",
                        f"{median(faster):.2f}" if faster else "",
                        str(total["engine_steps"]),
                        f"{total['tokens'] / total['steps']:.2f}",
                        " ".join(f"{row['reward']:.2f}" for row in epochs),
                    ]
                )
    head = ["at once", "method", "seconds, epochs 2+", "times as fast", "engine steps", "tokens a step", "reward"]
    return [table(head, rows)]


def _later(results: Results, method: str, concurrency: int) -> list[Row]:
    rows = [row for row in results.rows if row["method"] == method and row["concurrency"] == concurrency]
    return [row for row in rows if row["epoch"] > 1 and "seconds" in row]


def _faster(results: Results, method: str, concurrency: int) -> dict[int, float]:
    """Returns the tokens per second by epoch, relative to the rollouts without drafts."""
    faster = {}
    for row in results.rows:
        none = results.find(method=gpu_speedup.NONE, concurrency=concurrency, epoch=row["epoch"])
        if row["method"] == method and row["concurrency"] == concurrency and "seconds" in row and none:
            faster[row["epoch"]] = row["tokens"] / row["seconds"] * none["seconds"] / none["tokens"]
    return faster


def speedup_plot(results: Results) -> Figure:
    """Plots the tokens per second relative to no drafts over the epochs, one panel per concurrency."""
    concurrencies = _numbers(results, "concurrency")
    title = "Tokens a second of whole rollouts, relative to those without drafts"
    figure = titled(title, 4.4 * len(concurrencies), 4.6)
    panels = figure.subplots(1, len(concurrencies), squeeze=False, sharey=True)[0]
    for axes, concurrency in zip(panels, concurrencies, strict=True):
        for color, method in zip(COLORS, gpu_speedup.METHODS, strict=False):
            faster = _faster(results, method, concurrency)
            if faster and method != gpu_speedup.NONE:
                axes.plot(list(faster), list(faster.values()), color=color, marker="o", label=method)
        axes.axhline(1, color="#8a95a1", linestyle="--", label="no drafts")
        axes.set_title(f"{concurrency} requests at once")
        axes.set_xlabel("epoch")
        axes.set_xticks(_numbers(results, "epoch"))
    panels[0].set_ylim(bottom=0)  # applies to all panels; last, because it also fixes the upper end
    panels[0].legend(frameon=False)
    return figure


PARTS = {
    "cost": (cost_tables, cost_plot),
    "overhead": (overhead_tables, overhead_plot),
    "speedup": (speedup_tables, speedup_plot),
}
