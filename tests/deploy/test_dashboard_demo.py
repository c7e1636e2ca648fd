#!/usr/bin/env python3
"""Runs the demo under a real Prometheus, and says which panels of the dashboard stay empty: scripts/check-dashboard.

Exits with 1 if there is any. Needs `prometheus` (scripts/install-tools); --quick runs the short demo.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from dashboard import PANELS, RULES, samples
from prometheus import Prometheus

EVERY = 2.0  # seconds between two looks at the panels that are still empty


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    empty = {(title, target["expr"]) for title, panel in PANELS.items() for target in panel["targets"]}
    everything = len(empty)
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, ROOT / "examples" / "tiny_rl" / "run.py", "--out", Path(scratch, "demo")]
        command += ["--quick"] if arguments.quick else []
        with Path(scratch, "output").open("w+") as output, subprocess.Popen(command, stdout=output) as demo:
            prometheus = Prometheus(Path(scratch), [address(Path(output.name), demo)], RULES)
            while demo.poll() is None:
                empty = {one for one in empty if not samples(prometheus, one[1])}
                time.sleep(EVERY)
            prometheus.close()
            if demo.returncode:
                sys.exit(f"the demo failed:\n{Path(output.name).read_text()}")
    for title, expression in sorted(empty):
        print(f"empty: {title}: {expression}")
    print(f"{everything - len(empty)} of {everything} expressions in {len(PANELS)} panels showed something")
    return bool(empty)


def address(output: Path, demo: "subprocess.Popen[bytes]") -> str:
    """Where the demo's server is scraped, host:port: it says so first."""
    while demo.poll() is None:
        if found := re.search(r"http://([\w.:]+)/metrics", re.sub(r"\n", "", output.read_text())):
            return found[1]
        time.sleep(0.2)
    sys.exit(f"the demo ended at once:\n{output.read_text()}")


if __name__ == "__main__":
    sys.exit(main())
