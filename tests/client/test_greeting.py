"""The adapter's log lines when an engine starts, without vLLM and without a server."""

import logging
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from histospec.client.errors import ConfigurationError, Unavailable
from histospec.client.values import Inspection, NamespaceFacts, SharedPrompts
from histospec.client.vllm.greeting import greet

FACTS = NamespaceFacts(problems=12, responses=40, sessions=0, newest_epoch=3, lookups_hit=0, lookups_miss=0)


class Client:
    """Replaces a DraftClient: its shards answer as given, or it raises."""

    def __init__(self, *answers: Inspection | Exception) -> None:
        self.config = SimpleNamespace(namespace="run-1")
        self.ended = False
        self._answers = answers

    def greet(self, timeout: float) -> list[Inspection]:
        assert timeout <= 2
        for answer in self._answers:
            if isinstance(answer, Exception):
                raise answer
        return [answer for answer in self._answers if isinstance(answer, Inspection)]

    def shutdown(self) -> None:
        self.ended = True


def shard(name: str = "shard-0", **differently: Any) -> Inspection:
    usual: dict[str, Any] = {
        "shard": name, "version": "0.1.0", "time": 0.0, "limits": {"draft_tokens": 256}, "namespace": FACTS,
        "rights": ("read", "write", "admin"), "similar": (), "shared": (), "loaded": True,
    }  # fmt: skip
    return Inspection(**usual | differently)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    """said(answers) returns the log lines of a start, with their levels."""
    caplog.set_level(logging.INFO, "histospec")

    def start(*answers: Inspection | Exception, runner: str = "V1") -> list[str]:
        caplog.clear()
        client: Any = Client(*answers)
        greet(client, 16, runner)
        return [f"{record.levelname} {record.getMessage()}" for record in caplog.records]

    return start


@pytest.mark.parametrize(
    ("version", "line"),
    [
        ("0.32.0", ""),
        ("0.32.0+cpu", ""),
        (
            "0.33.0",
            "INFO HistoSpec: the sources of vLLM 0.33.0 have what HistoSpec relies on, but no test ran with it; ",
        ),
        (
            "0.34.0",
            "WARNING HistoSpec: vLLM 0.34.0 was neither tested nor read; tests ran with 0.27.0, 0.29.0, 0.32.0, ",
        ),
        ("0.32.1.dev3+g12ab", "WARNING HistoSpec: vLLM 0.32.1.dev3 was neither tested nor read; "),
    ],
)
def test_a_vllm_that_was_not_tested_is_named(
    said: Any, monkeypatch: pytest.MonkeyPatch, version: str, line: str
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    lines = said()
    assert len(lines) == bool(line)
    assert "".join(lines).startswith(line)


def test_every_shard_that_answers_is_named(said: Any) -> None:
    connected = "INFO HistoSpec: connected to"
    tail = "in namespace run-1; drafts of up to 16 tokens, model runner V1"
    assert said(shard(), shard("b", namespace=None, loaded=False)) == [
        f"{connected} shard-0 (0.1.0), 12 problems known {tail}",
        f"{connected} b (0.1.0), 0 problems known so far {tail}",
    ]
    assert said() == []


def test_another_namespace_may_be_meant(said: Any) -> None:
    """If no shard knows anything of this namespace, and all shards have loaded their store."""
    line = "WARNING HistoSpec: nothing is known in namespace 'run-1'; did you mean 'run-l'?"
    nothing = shard(namespace=None, similar=("run-l", "run-2"))
    assert line in said(nothing)
    assert line in said(shard("b", namespace=None), nothing)
    for others in ([shard()], [shard("b", namespace=None, loaded=False)]):
        assert line not in said(nothing, *others)
    assert line not in said(shard(similar=("run-l",)))


def test_prompts_that_another_namespace_knows(said: Any) -> None:
    """Also if this namespace has responses that its sessions do not find."""
    shared = (SharedPrompts("run-0", 3, 64), SharedPrompts("run-9", 60, 64))
    line = (
        "WARNING HistoSpec: 60 of the last 64 prompts of namespace 'run-1' are known in namespace 'run-9'; "
        "did you mean that one?"
    )
    assert said(shard("b"), shard(shared=shared))[2:] == [line]
    assert said(shard("b", namespace=replace(FACTS, lookups_hit=1)), shard(shared=shared))[2:] == []


def test_a_token_that_may_only_read(said: Any) -> None:
    line = "WARNING HistoSpec: the token may not write in namespace 'run-1'; shard-0 stores no responses of this engine"
    assert said(shard(rights=("read",)))[1:] == [line]


def test_a_limit_of_one_shard_is_refused() -> None:
    client: Any = Client(shard(), shard("b", limits={"draft_tokens": 8}))
    with pytest.raises(
        ValueError, match=r"num_speculative_tokens is 16; must be at most 8, the --max-draft-tokens of b"
    ):
        greet(client, 16, "V1")
    assert client.ended


def test_what_goes_wrong_costs_drafts_alone(said: Any) -> None:
    """Except for errors of the user's settings."""
    assert said(Unavailable("process 7 was forked")) == [
        "WARNING HistoSpec: process 7 was forked; going on WITHOUT drafts"
    ]
    with pytest.raises(ConfigurationError):
        said(ConfigurationError("tls: cannot read /ca.pem"))


def test_a_release_that_was_tested_with_one_runner_only(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.33.0"))
    assert (len(said(runner="V1")), len(said(runner="V2"))) == (1, 0)
