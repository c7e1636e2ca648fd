"""Finds the modules of the demo (examples/tiny_rl), whose policy and task some benchmarks run: imported before them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "tiny_rl"))
