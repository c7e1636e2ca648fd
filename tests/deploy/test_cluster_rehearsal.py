"""docs/rehearsal.md, run: its commands in a real control plane, with shards that are real processes.

Runs only with HISTOSPEC_TEST_CLUSTER=1 (make test-cluster), for some minutes.
"""

import base64
import os
import re
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from histospec.client import DraftClient, PermissionDenied
from tests.support.control_plane import Cluster, asked_for, running
from tests.support.histories import Written, expected, found, write, writings
from tests.support.programs import ROOT, program
from tests.support.releases import NEWEST_3, helm_program
from tests.support.running_nodes import RunningNodes
from tests.support.waiting import eventually

PAGE = ROOT / "docs" / "rehearsal.md"
BLOCK = re.compile(r"^```(yaml|console)\n(.*?)^```", re.M | re.S)

pytestmark = asked_for


def sections() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The headings of the page, each with the kinds and texts of its blocks."""
    for section in PAGE.read_text().split("\n## ")[1:]:
        yield section.partition("\n")[0], BLOCK.findall(section)


def matches(shown: str, output: str) -> bool:
    """Whether an output is as the page shows it: `…` is any text, `…` alone any lines, a space any spaces."""
    pattern = "".join(
        "(?:.*\n)*?" if line == "…" else re.sub(r"(\\ )+", r"\\s+", re.escape(line)).replace("…", ".*") + "\\s*?\n"
        for line in shown.splitlines()
    )
    return re.fullmatch(pattern, output.rstrip("\n") + "\n" if output else "") is not None


class Operator:
    """A person at a terminal, in a folder with the chart."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._api = cluster.api
        self._folder = folder
        bin_folder = folder / "bin"
        bin_folder.mkdir(parents=True)
        (bin_folder / "helm").symlink_to(helm_program(NEWEST_3))
        (bin_folder / "kubectl").symlink_to(program("kubectl"))
        (folder / "helm").symlink_to(ROOT / "helm")
        self._environment = {
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "KUBECONFIG": str(cluster.plane.kubeconfig),
            "HOME": str(folder),
        }
        # A new API server describes its kinds to kubectl only after a while.
        validates = "kubectl create configmap a --dry-run=client -o yaml | kubectl apply --dry-run=client -f -"
        eventually(lambda: self._run(validates).returncode == 0, "kubectl validates nothing")

    def _run(self, command: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["bash", "-o", "pipefail", "-c", command], cwd=self._folder, env=self._environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600,
        )  # fmt: skip

    def does(self, kind: str, text: str) -> None:
        """Writes the file, or runs the commands, of a block of the page."""
        if kind == "yaml":
            (self._folder / text.partition("\n")[0].removeprefix("# ")).write_text(text)
            return
        for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.M):
            done = self._run(command)
            assert done.returncode == 0, f"{command}\n{done.stdout}"
            assert matches(shown, done.stdout), f"{command}\n{done.stdout}\nis shown as\n{shown}"

    def token(self, name: str, key: str) -> str:
        """What is in a Secret of the release now."""
        secret = self._api.get(f"/api/v1/namespaces/rl/secrets/{name}")
        return base64.b64decode(secret["data"][key]).decode()

    def team(self) -> str:
        return self.token("histospec-token-team-a", "token")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    nodes = partial(RunningNodes, folder=tmp_path_factory.mktemp("volumes"))
    with running(tmp_path_factory.mktemp("control-plane"), nodes) as cluster:
        yield cluster


class Run:
    """A run of team-a, which stores responses at the beginning and looks for them later."""

    def __init__(self, operator: Operator, nodes: RunningNodes) -> None:
        self._operator, self._nodes = operator, nodes
        self._written: list[Written] = writings(seed=47, namespaces=["a-run-1"])
        self._first_token = ""

    def may_call(self, token: str) -> bool:
        try:
            with DraftClient(self._nodes.endpoint("rl"), "a-run-1", token=token, deadline=60.0) as client:
                client.history(self._written[0].prompt, self._written[0].name)
        except PermissionDenied:
            return False
        return True

    def finds_everything(self) -> None:
        assert found(self._nodes.endpoint("rl"), self._written, self._operator.team()) == expected(self._written)

    def after_install(self) -> None:
        self._first_token = self._operator.team()
        eventually(lambda: self.may_call(self._first_token), "the token is refused")
        write(self._nodes.endpoint("rl"), self._written, self._first_token)
        self.finds_everything()

    def after_upgrade(self) -> None:
        assert self._operator.team() == self._first_token
        self.finds_everything()

    def after_rotate(self) -> None:
        assert self._operator.team() != self._first_token
        eventually(lambda: not self.may_call(self._first_token), "the old token is still valid")
        self.finds_everything()

    def after_roll_back(self) -> None:
        assert self._operator.team() != self._first_token
        eventually(lambda: not self.may_call(self._first_token), "the old token is still valid")
        self.finds_everything()

    def after_back_up(self) -> None:
        self.finds_everything()

    def after_restore(self) -> None:
        self.finds_everything()

    def after_uninstall(self) -> None:
        eventually(lambda: all(pod.has_ended() for pod in self._nodes.pods), "a shard still runs")


def test_the_page_is_true(cluster: Cluster, tmp_path: Path) -> None:
    assert isinstance(cluster.nodes, RunningNodes)
    operator = Operator(cluster, tmp_path)
    run = Run(operator, cluster.nodes)
    for heading, blocks in sections():
        for kind, text in blocks:
            operator.does(kind, text)
        if blocks:
            getattr(run, f"after_{heading.lower().replace(' ', '_')}")()
