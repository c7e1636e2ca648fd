"""Servers of tests are forks: each a process of its own, as one that is started is."""

import os
import signal
from pathlib import Path

from tests.support import forks
from tests.support.servers import Starter


def test_a_fork_runs_the_command_to_its_end(tmp_path: Path) -> None:
    fork = forks.new(["no-such-word"], tmp_path, dict(os.environ), [])
    assert fork is not None
    assert fork.pid != os.getpid()
    assert "unknown command 'no-such-word'" in fork.stderr.read()
    assert (fork.wait(60), fork.poll()) == (2, 2)
    fork.send_signal(signal.SIGKILL)  # nothing: its process id may be another's by now


def test_a_fork_ends_by_its_own_signals_alone(start_server: Starter) -> None:
    killed, drained, deaf = start_server(), start_server(), start_server(ignoring=[signal.SIGHUP])
    assert killed.forked
    killed.signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    deaf.signal(signal.SIGHUP)
    drained.signal(signal.SIGHUP)
    assert drained.wait() == 0
    assert deaf.get("/healthz")[0] == 200
    deaf.drain()


def test_a_fork_has_variables_folder_and_descriptors_of_a_new_process(start_server: Starter, tmp_path: Path) -> None:
    forked = start_server(env={"HISTOSPEC_SHARD_NAME": "of-the-environment"}, name="forked")
    new = start_server(env={"HISTOSPEC_SHARD_NAME": "of-the-environment", "OTHER": "1"}, name="new")
    assert forked.forked
    assert not new.forked, "OTHER may matter to what a fork has imported already"
    for server in (forked, new):
        assert '"of-the-environment"' in server.get("/status")[1]
        assert os.readlink(f"/proc/{server.pid}/cwd") == str(tmp_path)

    def pipes(pid: int) -> int:
        links = [os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]
        return sum(link.startswith("pipe:") for link in links)

    assert pipes(forked.pid) == pipes(new.pid)
