"""A command whose extra is not installed says which one to install; with its extra alone, it runs."""

import functools
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from histospec.server.cli import COMMANDS
from scripts.lock import pyproject

EXTRAS: dict[str, list[str]] = pyproject()["project"]["optional-dependencies"]

WITHOUT = """
import sys
absent = set(sys.argv[1].split(","))
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from histospec.server.cli import main
sys.exit(main(sys.argv[2:]))
"""


@functools.cache
def owners() -> Mapping[str, list[str]]:
    """The packages that each top-level module is of; the search takes seconds."""
    return metadata.packages_distributions()


def modules(extra: str) -> set[str]:
    """The top-level modules of the packages that an extra names."""
    names = {Requirement(line).name.lower().replace("_", "-") for line in EXTRAS[extra]}
    return {top for top, of in owners().items() if names & {owner.lower().replace("_", "-") for owner in of}}


def histospec(*words: str, extra: str | None = None) -> "subprocess.CompletedProcess[str]":
    """Runs a command where no extra is installed, or one."""
    absent = set().union(*map(modules, EXTRAS)) - {"google", "histospec"} - (modules(extra) if extra else set())
    assert {"rich", "structlog", "transformers"} - absent <= (modules(extra) if extra else set())
    command = [sys.executable, "-c", WITHOUT, ",".join(sorted(absent)), *words]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "doctor"])
def test_a_command_says_which_extra_it_needs(command: str) -> None:
    done = histospec(command, "--help")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"histospec {command}: needs the package ")
    extra = "replay" if command == "replay" else "server"
    assert done.stderr.endswith(f", which is not installed: pip install 'histospec[{extra}]'\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs_with_its_extra_alone(command: str) -> None:
    extra = {"doctor": None, "replay": "replay"}.get(command, "server")
    done = histospec(command, "--help", extra=extra)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: histospec {command} ")


def test_the_extra_of_replay_has_what_renders_chat_templates() -> None:
    """Transformers uses jinja2 without requiring it."""
    assert "jinja2" in {Requirement(line).name for line in EXTRAS["replay"]}
