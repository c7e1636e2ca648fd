"""The doctor's checks for facts that real processes cannot produce, such as other versions of vLLM and of servers."""

from dataclasses import replace

import pytest

from histospec.client.config import configure
from histospec.client.doctor import checks
from histospec.client.doctor.checks import CHECKS, examine
from histospec.client.doctor.facts import Facts, Failure, ShardFacts, Vllm
from histospec.client.doctor.findings import Finding, as_text, bad, judged, merged, ok
from histospec.client.values import Inspection, NamespaceFacts

WELL = Inspection(
    shard="a",
    version="0.1.0",
    time=0.0,
    limits={"batch": 4096, "message_bytes": 1 << 26, "draft_tokens": 256, "sessions": 65536},
    rights=("read", "write"),
    namespace=NamespaceFacts(3, 9, 0, 2, 5, 1),
    similar=(),
    shared=(),
    loaded=True,
)
CONFIG = configure("a=host-a:6378,b=host-b:6378", "run")


def shard(number: int = 0, **changes: object) -> ShardFacts:
    endpoint = CONFIG.endpoints[number]
    return replace(ShardFacts(endpoint, inspection=WELL, steps=(0.001,) * 20), **changes)  # type: ignore[arg-type]


def facts(*shards: ShardFacts, **changes: object) -> Facts:
    well = Facts(config=CONFIG, version="0.1.0", shards=shards or (shard(0), shard(1)), vllm=Vllm("0.32.0", None))
    return replace(well, **changes)  # type: ignore[arg-type]


def faults(found: Facts) -> list[tuple[str, str]]:
    return [(finding.level, finding.check) for finding in examine(found) if finding.level != "ok"]


def test_nothing_is_wrong_where_nothing_is() -> None:
    assert faults(facts()) == []
    assert faults(facts(vllm=None)) == []


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("0.21.2", "bad"),
        ("0.22.0", "ok"),
        ("0.27.1.dev3+g12ab", "warn"),
        ("0.32.0+cpu", "ok"),
        ("0.33.0", "ok"),
        ("0.34.0", "warn"),
        ("1.0", "warn"),
        ("unknown", "warn"),
    ],
)
def test_versions_of_vllm(version: str, level: str) -> None:
    (finding,) = checks.vllm(facts(vllm=Vllm(version, None)))
    assert (finding.level, finding.check) == (level, "vllm")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "with the model's own drafter, set VLLM_USE_V2_MODEL_RUNNER=0"),
        ("0", "model runner V1"),
        ("1", "model runner V2"),
    ],
)
def test_the_model_runner(value: str | None, said: str) -> None:
    (finding,) = checks.runner(facts(vllm=Vllm("0.32.0", value)))
    assert finding.level == "ok"
    assert said in finding.text


@pytest.mark.parametrize(
    ("plugins", "fault"), [(None, False), ("histospec", False), ("other,histospec", False), ("other", True), ("", True)]
)
def test_the_plugin_that_vllm_may_not_load(plugins: str | None, fault: bool) -> None:
    assert faults(facts(vllm=Vllm("0.32.0", None, plugins))) == ([("bad", "plugin")] if fault else [])


def test_a_service_that_is_no_draft_server() -> None:
    missing = Failure("UNIMPLEMENTED", "Method not found!")
    other = facts(shard(inspection=None, failure=missing, drafts=False))
    assert faults(other) == [("bad", "endpoint")]
    assert "speaks gRPC, but is no draft server" in next(iter(checks.endpoint(other))).text


def test_a_server_that_takes_connections_and_fails() -> None:
    draining = facts(shard(inspection=None, failure=Failure("UNAVAILABLE", "the server is draining")))
    assert faults(draining) == [("bad", "endpoint")]
    broken = facts(
        shard(steps=(), step_failure=Failure("INTERNAL", "the answer to a step has another sequence number"))
    )
    assert faults(broken) == [("bad", "step")]


@pytest.mark.parametrize(
    ("seconds", "level"),
    [([0.001] * 20, "ok"), ([0.001] * 18 + [0.1] * 2, "ok"), ([0.001] * 17 + [0.1] * 3, "warn"), ([0.1] * 20, "bad")],
)
def test_steps_and_the_deadline(seconds: list[float], level: str) -> None:
    (finding,) = checks.step(facts(shard(steps=tuple(seconds))))
    assert finding.level == level


@pytest.mark.parametrize(
    ("ahead", "doubt", "text"),
    [
        (59.0, 0.0, "agrees"),
        (-3000.0, 2945.0, "agrees"),  # the call took too long to know better
        (3700.0, 0.1, "1 h 2 min ahead of"),
        (-90.0, 0.1, "1 min behind"),
        (86_400.0 * 3, 0.1, "72 h 0 min ahead of"),
    ],
)
def test_clocks(ahead: float, doubt: float, text: str) -> None:
    (finding,) = checks.clock(facts(shard(ahead=ahead, doubt=doubt)))
    assert text in finding.text


def test_versions_that_fit() -> None:
    patch = facts(shard(inspection=replace(WELL, version="0.1.7")))
    assert faults(patch) == []
    assert faults(facts(shard(inspection=replace(WELL, version="0.2.0")))) == [("warn", "version")]


@pytest.mark.parametrize(
    ("changes", "check", "said"),
    [
        (
            {"lookups_hit": 0, "lookups_miss": 41, "misnamed_lookups": 31},
            "lookups",
            "31 of 41 sessions named a problem without responses",
        ),
        ({"lookups_hit": 90, "lookups_miss": 10, "misnamed_lookups": 10}, "", ""),
        ({"lookups_hit": 0, "lookups_miss": 64}, "lookups", "none of 64 sessions"),
        ({"newest_epoch": 20, "behind": 20, "behind_epoch": 16}, "epochs", "the last 20 responses are of epoch 16 or"),
        ({"newest_epoch": 20, "behind": 19, "behind_epoch": 16}, "", ""),
    ],
)
def test_what_hides_the_history(changes: dict[str, int], check: str, said: str) -> None:
    assert WELL.namespace is not None
    there = replace(WELL, namespace=replace(WELL.namespace, **changes))
    found = examine(facts(shard(inspection=there), shard(1, inspection=replace(WELL, namespace=None))))
    wrong = [finding for finding in found if finding.level != "ok"]
    assert [finding.check for finding in wrong] == [check] * bool(check)
    assert not wrong or said in wrong[0].text


def test_what_is_said_of_all_shards_is_said_once() -> None:
    both = [ok("clock", "fine", "a"), ok("clock", "fine", "b"), bad("step", "late", "wait", "b")]
    assert merged(both, 2) == [ok("clock", "fine"), bad("step", "late", "wait", "b")]
    assert merged([bad("step", "late", "wait", "a")], 1) == [bad("step", "late", "wait")]


def test_the_text_fits_80_columns_and_obeys_nothing() -> None:
    name = "\x1b[2J" + "long-" * 20
    found = facts(shard(inspection=replace(WELL, namespace=None, similar=(name,))), shard(1, steps=(0.1,) * 20))
    findings = examine(found)
    text = as_text(found, findings)
    assert "\x1b" not in text
    lines = [line for line in text.splitlines() if "long-long" not in line]
    assert max(map(len, lines)) <= 80
    assert text.splitlines()[0] == "a=host-a:6378,b=host-b:6378, namespace 'run'"
    assert "  BAD   step       b: 20 steps took 100.0 ms at the median" in text
    assert text.endswith("run it again.\n")
    assert all(ord(letter) < 128 for letter in text.replace("\N{REPLACEMENT CHARACTER}", ""))


@pytest.mark.parametrize(
    ("findings", "sentence"),
    [
        ([ok("a", "b")], "No problem found."),
        ([Finding("warn", "a", "b", "c")], "No problem found, 1 warning."),
        ([bad("a", "b", "c")] * 2, "2 problems. Follow the arrows from the top, then run it again."),
        ([bad("a", "b", "c"), Finding("warn", "a", "b", "c")], "1 problem, 1 warning. Follow the arrows "),
    ],
)
def test_the_last_sentence(findings: list[Finding], sentence: str) -> None:
    assert judged(findings).startswith(sentence)


def test_every_fault_comes_with_advice() -> None:
    missing = Failure("UNAUTHENTICATED", "no token")
    worst = replace(WELL, rights=("read",), loaded=False, trouble="gone", limits={"draft_tokens": 1, "sessions": 4})
    found = facts(
        shard(inspection=replace(worst, version="9.9"), ahead=9999.0, steps=(1.0,) * 3),
        shard(1, inspection=None, failure=missing),
        vllm=Vllm("0.1", "1", "other"),
        adapter="HISTOSPEC_SAMPLING: x",
        others=CONFIG.endpoints[:1],
    )
    findings = [finding for finding in examine(found) if finding.level != "ok"]
    assert len({finding.check for finding in findings}) >= 10
    assert all(finding.advice and finding.check.isalpha() and len(finding.check) <= 9 for finding in findings)
    assert len(CHECKS) == len(set(CHECKS))
