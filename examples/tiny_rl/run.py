"""A small, real RL run with vLLM on the CPU: how many decoding steps does a draft server save?

    python -m examples.tiny_rl.run            # three to four minutes on two cores; `make demo` runs this
    python -m examples.tiny_rl.run --quick    # about a minute
    python -m examples.tiny_rl.run --drafter  # a draft model drafts, too, like a model's own drafter

Exits with 1 if the run broke a promise that it prints.
"""

import argparse
import logging
import os
import sys
import tempfile
import warnings
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from rich.console import Console

from examples import draft_server
from examples.tiny_rl import plot, results, table

TITLE = "GRPO at temperature 1, every epoch rolled out with and without drafts"
NAMESPACE = f"tiny-rl-{datetime.now():%Y%m%d-%H%M%S}"
"""Each run has a namespace of its own, so earlier runs in the store change nothing."""


def main() -> int:
    """Runs the demo. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few problems, three epochs")
    parser.add_argument("--epochs", type=int, help="how often the policy visits the problems, at least 2")
    parser.add_argument(
        "--drafter", nargs="?", const=True, type=Path, metavar="WEIGHTS",
        help="also draft with a draft model: the shipped one, or WEIGHTS from make_drafter.py",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the plot, the table and the logs")
    parser.add_argument(
        "--verify-cost",
        metavar="COST",
        help="cost of verifying a drafted token, in units of a step without drafts: a number, such as 0.05 "
        "for a GPU, or 'auto' (default), which learns it from the time of the steps",
    )
    parser.add_argument("--data-dir", type=Path, help="where the server keeps its store (default: a temporary folder)")
    arguments = parser.parse_args()
    if arguments.epochs is not None and arguments.epochs < 2:
        parser.error("--epochs must be at least 2: the later epochs draft from the earlier ones")
    arguments.out.mkdir(parents=True, exist_ok=True)

    console = Console()
    log = arguments.out / "server.log"
    with (
        tempfile.TemporaryDirectory() as scratch,
        draft_server.running(arguments.data_dir or Path(scratch) / "store", log) as server,
    ):
        places = {"Draft server:": server.endpoint, "its metrics:": server.metrics_url, "its log:": str(log)}
        console.print(table.listed(places.items()))
        _prepare_environment(server.endpoint)
        if arguments.verify_cost is not None:
            os.environ["HISTOSPEC_VERIFY_COST"] = arguments.verify_cost
        epochs = _run(arguments, server, Path(scratch) / "policy", console)
        return _conclude(epochs, arguments.out, server, console)


def _prepare_environment(endpoint: str) -> None:
    """Sets what vLLM and the adapter read from the environment; call it before they are imported."""
    os.environ.update(HISTOSPEC_ENDPOINT=endpoint, HISTOSPEC_NAMESPACE=NAMESPACE)
    os.environ.setdefault("HISTOSPEC_DEADLINE", "0.2")  # seconds: two cores run everything
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for so small a model, more threads only wait for each other
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # both engines in this process, to count and to push weights
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.getLogger("vllm.triton_utils").setLevel(logging.ERROR)  # logged before vLLM sets its level
    warnings.filterwarnings("ignore", category=FutureWarning)  # warnings of vLLM about its own code
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()


def _run(
    arguments: argparse.Namespace, server: draft_server.DraftServer, folder: Path, console: Console
) -> list[results.Epoch]:
    from examples.tiny_rl import loop, policy  # imports vLLM

    settings = loop.Settings(drafter=policy.SHIPPED_DRAFTER if arguments.drafter is True else arguments.drafter)
    if arguments.quick:
        settings = replace(settings, epochs=3, problems=8)
    if arguments.epochs is not None:
        settings = replace(settings, epochs=arguments.epochs)
    console.print(
        f"\nGRPO on {settings.problems} problems x {settings.samples} samples, {settings.epochs} epochs, "
        "temperature 1.\n"
        "Every epoch is rolled out with and without drafts on the same weights;\n"
        "the rollouts with drafts train.\n"
    )
    epochs = []
    with table.progress(console) as progress:
        for epoch in loop.run(settings, server, NAMESPACE, folder, progress):
            progress.add(epoch)
            epochs.append(epoch)
    return epochs


def _conclude(epochs: list[results.Epoch], out: Path, server: draft_server.DraftServer, console: Console) -> int:
    """Prints the promises and where to find the results; saves the table and the plot. Returns the exit status."""
    promises = results.promises(epochs)
    results.save(epochs, promises, out / "tiny_rl.json")
    plot.save(epochs, TITLE, out / "tiny_rl.png")
    table.explain(console, drafter=epochs[0].with_drafts.history is not None)
    console.print()
    console.print(table.listed(("[green]kept" if each.kept else "[bold red]BROKEN", each.text) for each in promises))
    found = {
        "Plot:": out / "tiny_rl.png",
        "Table:": out / "tiny_rl.json",
        "Server's log:": out / "server.log",
        "About this run:": "examples/tiny_rl/README.md",
        "Your own vLLM:": "README.md",
        "Your own rollouts:": "histospec replay FILE.jsonl",
    }
    console.print()
    console.print(table.listed((what, str(where)) for what, where in found.items()))
    return 0 if all(promise.kept for promise in promises) else 1


if __name__ == "__main__":
    sys.exit(main())
