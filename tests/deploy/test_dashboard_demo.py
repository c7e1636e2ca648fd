"""The dashboard, against a real Prometheus that scrapes the demo's server: no panel stays empty while the demo runs."""

import importlib.util
import re
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.dashboard import PANELS, ROOT, RULES, samples
from tests.support.prometheus import Prometheus, require

TWINS = "histospec_twin_"  # expressions about coupled sampling, which the demo does not use
EVERY = 2.0  # seconds between checks of the panels that are still empty


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs a vLLM build in the environment")
def test_the_demo_leaves_no_panel_empty(tmp_path: Path) -> None:
    require("prometheus")
    shown = {(title, target["expr"]) for title, panel in PANELS.items() for target in panel["targets"]}
    empty = {(title, expression) for title, expression in shown if TWINS not in expression}
    said = tmp_path / "said"
    command = [sys.executable, "-m", "examples.tiny_rl.run", "--quick", "--out", str(tmp_path / "demo")]
    with said.open("w") as output, subprocess.Popen(command, stdout=output, cwd=ROOT) as demo:
        with closing(Prometheus(tmp_path, [_scraped(said, demo)], RULES)) as prometheus:
            while demo.poll() is None:
                empty = {one for one in empty if not samples(prometheus, one[1])}
                time.sleep(EVERY)
        assert demo.returncode == 0, said.read_text()
    assert empty == set()


def _scraped(said: Path, demo: "subprocess.Popen[bytes]") -> str:
    """Returns the HTTP address of the demo's server, which the demo prints first."""
    while demo.poll() is None:
        if found := re.search(r"http://([\w.:]+)/metrics", said.read_text().replace("\n", "")):
            return found[1]
        time.sleep(0.2)
    raise AssertionError(f"the demo ended at once: {said.read_text()}")
