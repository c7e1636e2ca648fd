"""Inspect: what it says about a namespace, to which callers, and without side effects."""

import difflib
from pathlib import Path
from typing import Any

import grpc
import pytest

from histospec.client import DraftClient, Inspection, PermissionDenied, Response, SharedPrompts
from histospec.server.history.namespaces import MIDDLE, NEIGHBOURS, look_alikes
from histospec.v1 import draft_pb2 as pb
from tests.support.servers import Server, Starter, secret, with_tokens
from tests.support.wires import Wire


def ask(server: Server, namespace: str, who: str = "operator") -> Inspection:
    with DraftClient(server.endpoint, namespace, token=secret(who), deadline=60.0) as client:
        return client.inspect(60.0)[0]


def fill(server: Server, namespace: str, prompts: range) -> None:
    with DraftClient(server.endpoint, namespace, token=secret("operator"), deadline=60.0) as client:
        for prompt in prompts:
            client.ingest([1, prompt], [Response([5, 6])], epoch=3)


@pytest.fixture
def guarded(start_server: Starter, tmp_path: Path) -> Server:
    tokens = with_tokens(tmp_path, operator={}, reader={"namespaces": ["run-1"], "rights": ["read"]})
    return start_server(*tokens, name="guarded")


def test_namespaces_that_share_prompts_the_most_first(server: Server) -> None:
    for number, prompts in enumerate((range(10), range(6), range(2), range(90, 95))):
        fill(server, f"day-{number}", prompts)
    told = ask(server, "day-0")
    assert told.shared == (SharedPrompts("day-1", 6, 10), SharedPrompts("day-2", 2, 10))
    assert ask(server, "day-3").shared == ()
    assert ask(server, "absent").shared == ()
    assert told.namespace is not None
    assert (told.namespace.problems, told.namespace.responses, told.namespace.newest_epoch) == (10, 10, 3)


def test_counters_are_those_of_the_metrics(server: Server) -> None:
    with DraftClient(server.endpoint, "run-1", deadline=60.0) as client:
        client.ingest([1], [Response(range(10, 40))])
        sessions = client.open([[1], [2]])
        client.step(sessions, [[], []], max_tokens=0)
        (draft, empty) = client.step(sessions, [[10, 11], [7]])
        client.step(sessions, [draft.tokens[:1], [8]], max_tokens=0)
        client.step(client.open([[3]]), [[7]])  # waits until the server has all of that
        (told,) = client.inspect(60.0)
    facts = told.namespace
    assert facts is not None
    assert len(draft) > len(empty) == 0
    metrics = {name: value for name, value in server.metrics().items() if 'namespace="run-1"' in name}

    def total(name: str, label: str = "") -> float:
        keys = [key for key in metrics if key.startswith(f"histospec_{name}_total") and label in key]
        return sum(metrics[key] for key in keys)

    assert (facts.lookups_hit, facts.lookups_miss) == (1, 2)
    assert (facts.drafts_hit, facts.drafts_empty) == (1, 2) == (total("drafts", "hit"), total("drafts", "empty"))
    assert facts.draft_tokens == len(draft) == total("draft_tokens")
    assert facts.accepted_tokens == 1 == total("accepted_tokens")
    assert facts.generated_tokens == 6 == total("generated_tokens")
    assert facts.undrafted_tokens == total("undrafted_tokens")
    assert facts.model_draft_tokens == facts.model_accepted_tokens == 0


def test_at_most_eight_of_them(server: Server) -> None:
    for number in range(12):
        fill(server, f"day-{number:02}", range(3))
    assert [shared.namespace for shared in ask(server, "day-11").shared] == [f"day-{n:02}" for n in range(8)]


def test_only_what_the_caller_may_read(guarded: Server) -> None:
    for namespace in ("run-1", "run-2"):
        fill(guarded, namespace, range(3))
    assert ask(guarded, "run-1").shared == (SharedPrompts("run-2", 3, 3),)
    assert ask(guarded, "run-1").similar == ("run-2",)
    bound = ask(guarded, "run-1", "reader")
    assert bound.rights == ("read",)
    assert (bound.shared, bound.similar) == ((), ())
    assert bound.namespace is not None
    strange = ask(guarded, "run-2", "reader")
    assert (strange.rights, strange.namespace, strange.shared, strange.similar) == ((), None, (), ("run-1",))
    with pytest.raises(PermissionDenied):
        ask(guarded, "run-1", "stranger")


def test_names_that_the_caller_may_not_read_crowd_out_no_others(guarded: Server) -> None:
    for namespace in ("run-1", *(f"run-1z{letter}" for letter in "abcdefghij")):
        fill(guarded, namespace, range(1))
    assert len(ask(guarded, "run-1zz").similar) == 8
    assert ask(guarded, "run-1zz", "reader").similar == ("run-1",)


def test_the_cost_of_look_alikes_does_not_grow_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    real = difflib.SequenceMatcher.ratio

    def ratio(matcher: difflib.SequenceMatcher[str]) -> float:
        compared.append(matcher)
        return real(matcher)

    monkeypatch.setattr(difflib.SequenceMatcher, "ratio", ratio)
    name = "".join(chr(ord("a") + number * number % 26) for number in range(120))
    others = [f"{name}-{number:04}" for number in range(2000)] + [f"{number:04}-{name}" for number in range(2000)]
    assert len(look_alikes(name, others, 8)) == 8
    assert len(compared) <= 4 * NEIGHBOURS  # on two sides, in two orders


def test_of_long_names_only_a_short_middle_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    real = difflib.SequenceMatcher.__init__

    def remember(matcher: Any, isjunk: Any, first: str, second: str) -> None:
        compared.extend((first, second))
        real(matcher, isjunk, first, second)

    monkeypatch.setattr(difflib.SequenceMatcher, "__init__", remember)
    name = "".join(chr(ord("a") + number * number % 26) for number in range(120))
    spread = ["".join("-" if i % 9 == number else c for i, c in enumerate(name)) for number in range(9)]
    near = f"{name[:60]}-_-{name[63:]}"
    assert look_alikes(name, [*spread, near], 8) == [near]
    assert "-_-" in compared
    assert all(len(text) <= MIDDLE for text in compared)


def test_look_alikes_differ_at_either_end_or_in_between() -> None:
    others = [f"other-{number}" for number in range(100)]
    assert look_alikes("run-1", [*others, "run-2", "my-run-1", "rum-1", "run-1"], 8) == ["run-2", "rum-1", "my-run-1"]


def test_a_store_that_is_gone_is_said_to_who_may_write(guarded: Server, tmp_path: Path) -> None:
    fill(guarded, "run-1", range(2))
    assert ask(guarded, "run-1").trouble == ""
    (tmp_path / "guarded").rename(tmp_path / "moved")
    assert ask(guarded, "run-1").trouble.startswith("store: ")
    assert ask(guarded, "run-1", "reader").trouble == ""


def test_a_namespace_that_is_asked_about_is_not_made(server: Server) -> None:
    assert ask(server, "absent").namespace is None
    assert ask(server, "absent").namespace is None
    assert not [name for name in server.metrics() if "absent" in name]


def test_a_namespace_that_cannot_be_one(wire: Wire) -> None:
    for name, sentence in (("", "namespace: must not be empty"), ("x" * 129, "namespace: 129 characters are more")):
        with pytest.raises(grpc.RpcError, match=sentence):
            wire.stub.Inspect(pb.InspectRequest(namespace=name), timeout=60)
