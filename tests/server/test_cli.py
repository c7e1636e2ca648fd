"""The `histospec` command as a user meets it."""

import subprocess
import sys

import pytest


def histospec(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "histospec.server", *words], cwd="/", capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("word", ["--help", "-h", "help"])
def test_help_lists_the_commands(word):
    result = histospec(word)
    assert (result.returncode, result.stderr) == (0, "")
    assert all(f"  {command} " in result.stdout for command in ("serve", "replay", "status"))


def test_version():
    assert histospec("--version").stdout.startswith("histospec 0.")


def test_no_command_or_a_wrong_one():
    assert histospec().returncode == 2
    result = histospec("surve")
    assert result.returncode == 2
    assert (
        result.stderr
        == "histospec: there is no command 'surve'; use one of serve, replay, snapshot, restore, bench, status\n"
    )


def test_serve_help_names_every_option():
    text = histospec("serve", "--help").stdout
    for flag in ("--listen", "--data-dir", "--memory", "--peers", "--insecure", "--history-epochs", "--drain-seconds"):
        assert flag in text
    assert "(default: 8GiB)" in text


def test_status_of_a_running_server(server, wire):
    wire.ingest([1, 2, 3], [range(30)])
    wire.stream().ask(opens=[wire.open(1)], step=wire.step([1], [[0, 1, 2]]))
    result = histospec("status", server.endpoint, "--http", server.http)
    assert (result.returncode, result.stderr) == (0, "")
    for text in (server.endpoint, "SERVING", "1 of 1 (100%)", "tokens of history", "30"):
        assert text in result.stdout
    result = histospec("status", server.endpoint, "--http", "127.0.0.1:1")
    assert result.returncode == 0
    assert "say where /metrics is with --http" in result.stdout


def test_status_of_a_shard_that_is_down(start_server):
    server = start_server("--peers", "127.0.0.1:1")
    result = histospec("status", server.endpoint, "--http", server.http, "--timeout", "2")
    assert result.returncode == 1
    assert "UNAVAILABLE" in result.stdout


def test_status_of_a_shard_that_listens_everywhere(start_server):
    server = start_server("--listen", "0.0.0.0:0", "--insecure", "--shard-name", "shard-0")
    reached = server.endpoint.replace("0.0.0.0", "127.0.0.2")
    result = histospec("status", reached, "--http", server.http)
    assert (result.returncode, result.stderr) == (0, "")
    assert reached in result.stdout
    assert "0.0.0.0:" not in result.stdout


def test_status_of_nobody():
    result = histospec("status", "127.0.0.1:1")
    assert result.returncode == 1
    assert result.stderr.startswith("histospec status: 127.0.0.1:1 cannot be reached (UNAVAILABLE")
    assert result.stderr.count("\n") == 1
    assert histospec("status", "nowhere").returncode == 2
    assert histospec("status").returncode == 2
