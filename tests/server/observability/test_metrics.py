"""Exact values of /metrics."""

import gzip
import json
import shutil
import urllib.request
from typing import Any, cast

import numpy as np
import pytest

from histospec.native import SOURCES, Engine
from histospec.server.errors import StoreError
from histospec.server.history.tenants import Tenants
from histospec.server.observability.vitals import Vitals
from histospec.server.security.access import Access
from histospec.server.settings.config import Config
from histospec.server.stores.interface import Store
from histospec.v1 import draft_pb2 as pb
from tests.support.servers import Server, Starter
from tests.support.waiting import eventually
from tests.support.wires import Connector, Wire, i32

RESPONSE = list(range(10, 40))


def test_every_name_of_the_contract_is_there_from_the_start(server: Server, wire: Wire) -> None:
    wire.ingest([1], [[2]])
    text = server.get("/metrics")[1]
    for name, kind in {
        "problem_lookups_total": "counter",
        "twin_lookups_total": "counter",
        "drafts_total": "counter",
        "draft_tokens_total": "counter",
        "accepted_tokens_total": "counter",
        "generated_tokens_total": "counter",
        "ingested_responses_total": "counter",
        "ingested_tokens_total": "counter",
        "evicted_responses_total": "counter",
        "history_tokens": "gauge",
        "index_bytes": "gauge",
        "sessions": "gauge",
        "rpc_seconds": "histogram",
        "draft_seconds": "histogram",
        "too_old_responses_total": "counter",
        "store_errors_total": "counter",
        "source_draft_tokens_total": "counter",
        "source_accepted_tokens_total": "counter",
        "undrafted_tokens_total": "counter",
        "verify_microsteps_total": "counter",
        "verify_cost": "gauge",
        "misnamed_lookups_total": "counter",
        "late_steps_total": "counter",
        "refusals_total": "counter",
        "aborted_responses_total": "counter",
    }.items():
        assert f"# TYPE histospec_{name} {kind}\n" in text
    assert "process_resident_memory_bytes" in text
    assert "_created" not in text


def test_counts_equal_what_was_done(server: Server, wire: Wire) -> None:
    """
    1. Ingest three responses of a problem; open two sessions on it and one on another problem.
    2. Each generates; one follows its drafts; one commits.
    3. Every counter has the expected sum.
    """
    wire.ingest([1, 2, 3], [RESPONSE] * 3, epoch=1)
    stream = wire.stream()
    answer = stream.ask(
        opens=[wire.open(1), wire.open(2), wire.open(3, [9])], step=wire.step([1, 2, 3], [RESPONSE[:4], [900], [901]])
    )
    drafts = wire.drafts(answer)
    drafted, results = sum(map(len, drafts)), [bool(draft) for draft in drafts]
    followed = drafts[0][:3]
    assert followed
    answer = stream.ask(step=wire.step([1], [[*followed, 902]], [4], max_tokens=0))
    stream.ask(closes=[wire.commit(1, 4 + len(followed) + 1)])
    stream.send(closes=[pb.CloseSession(session=2)])
    stream.ask(step=wire.step([], []))  # a rehearsal, which counts nowhere

    samples = server.metrics()
    committed = 4 + len(followed) + 1
    expected = {
        'problem_lookups_total{namespace="run",result="hit"}': 2,
        'problem_lookups_total{namespace="run",result="miss"}': 1,
        'drafts_total{namespace="run",result="hit"}': sum(results),
        'drafts_total{namespace="run",result="empty"}': 3 - sum(results),
        'draft_tokens_total{namespace="run"}': drafted,
        'accepted_tokens_total{namespace="run"}': len(followed),
        'generated_tokens_total{namespace="run"}': committed + 2,
        'undrafted_tokens_total{namespace="run"}': 3,  # the first four tokens, without the prompt's own
        'verify_microsteps_total{namespace="run"}': 50_000 * drafted,
        "ingested_responses_total": 4,
        "ingested_tokens_total": 3 * len(RESPONSE) + committed,
        'evicted_responses_total{namespace="run",reason="memory"}': 0,
        'evicted_responses_total{namespace="run",reason="epochs"}': 0,
        'evicted_responses_total{namespace="run",reason="responses"}': 0,
        "history_tokens": 3 * len(RESPONSE) + committed,
        "sessions": 1,
        "streams": 1,
        "store_errors_total": 0,
        'source_draft_tokens_total{namespace="run",source="history"}': drafted,
        'source_draft_tokens_total{namespace="run",source="own"}': 0,
        'source_draft_tokens_total{namespace="run",source="siblings"}': 0,
        'source_draft_tokens_total{namespace="run",source="namespace"}': 0,
        'source_accepted_tokens_total{namespace="run",source="history"}': len(followed),
        'source_accepted_tokens_total{namespace="run",source="own"}': 0,
        'verify_cost{namespace="run"}': float(np.float32(0.05)),
        "loaded_responses": 0,
        'rpc_seconds_count{method="Ingest"}': 1,
        'rpc_seconds_count{method="Draft"}': 3,
        "draft_seconds_count": 2,
    }
    assert {name: samples[f"histospec_{name}"] for name in expected} == expected
    assert samples["histospec_index_bytes"] > 0


def test_twins_are_counted(server: Server, wire: Wire) -> None:
    """Counts of sessions with a seed, with and without a twin; tokens drafted from twins, and accepted ones."""
    text = [*RESPONSE[:10], *range(500, 540)]
    wire.ingest([1, 2, 3], [RESPONSE])
    stream = wire.stream()
    stream.ask(opens=[wire.open(1, seed=7)], step=wire.step([1], [text]))
    stream.ask(closes=[wire.commit(1, len(text))])
    opens = [wire.open(2, seed=7), wire.open(3, seed=8), wire.open(4)]
    (draft, _, _) = wire.drafts(stream.ask(opens=opens, step=wire.step([2, 3, 4], [text[:1]] * 3)))
    assert draft == text[1 : 1 + len(draft)]
    stream.ask(step=wire.step([2], [[*draft[:3], 9]], [1], max_tokens=0))
    samples = server.metrics()
    expected = {
        'twin_lookups_total{namespace="run",result="hit"}': 1,
        'twin_lookups_total{namespace="run",result="miss"}': 2,
        'source_draft_tokens_total{namespace="run",source="twin"}': len(draft),
        'source_accepted_tokens_total{namespace="run",source="twin"}': 3,
    }
    assert {name: samples[f"histospec_{name}"] for name in expected} == expected


def test_the_workers_own_drafts_are_counted_beside_ours(server: Server, wire: Wire) -> None:
    """
    1. A worker reports with each step what it verified of the server's draft: nothing, then all, then two tokens.
    2. Only verified tokens count as drafted; the worker's own drafter is a separate source.
    3. The page, which shows the same JSON as `histospec status`, has both.
    """
    wire.ingest([1, 2, 3], [RESPONSE] * 3, epoch=1)
    stream = wire.stream()

    def step(new: list[int], at: int, *report: int) -> list[int]:
        fields: dict[str, Any] = dict(
            zip(("verified", "model_drafted", "model_accepted"), map(i32, zip(report, strict=True)), strict=True)
        )
        message = wire.step([1], [new], [at])
        message.MergeFrom(pb.Step(**fields))
        (draft,) = wire.drafts(stream.ask(step=message, opens=[] if at else [wire.open(1)]))
        return draft

    first = step(RESPONSE[:4], 0, 0, 0, 0)
    assert first
    second = step(RESPONSE[4:7], 4, 0, 3, 2)
    step([*second, 900], 7, len(second), 0, 0)
    step([901, 902], 8 + len(second), 2, 0, 0)
    samples = server.metrics()
    expected = {
        'source_draft_tokens_total{namespace="run",source="model"}': 3,
        'source_accepted_tokens_total{namespace="run",source="model"}': 2,
        'accepted_tokens_total{namespace="run"}': len(second),
        'generated_tokens_total{namespace="run"}': 4 + 3 + len(second) + 1 + 2,
        'undrafted_tokens_total{namespace="run"}': 3 + 1,  # without the prompt's own: at first, and at last
    }
    assert {name: samples[f"histospec_{name}"] for name in expected} == expected
    drafted = samples['histospec_draft_tokens_total{namespace="run"}']
    assert len(second) <= drafted <= len(second) + 2
    by_source = [samples[f'histospec_source_draft_tokens_total{{namespace="run",source="{s}"}}'] for s in SOURCES]
    assert sum(by_source) == drafted + 3
    assert json.loads(server.get("/status")[1])["sources"]["model"] == {"draft_tokens": 3, "accepted_tokens": 2}


def test_late_steps_are_what_workers_report_and_no_more_than_there_were(server: Server, wire: Wire) -> None:
    stream = wire.stream()
    stream.ask(opens=[wire.open(1)], step=wire.step([1], [[5]]))
    stream.ask(step=wire.step([1], [[6]], [1]))
    step = wire.step([1], [[7]], [2])
    step.late = 2
    stream.ask(step=step)
    assert server.metrics()["histospec_late_steps_total"] == 2
    step.late = 2  # three steps so far, two of them reported
    stream.send(step=step)
    assert stream.error().details() == "step.late: 2 are more than the 1 steps not reported so far"
    assert server.metrics()["histospec_late_steps_total"] == 2


def test_what_is_refused_within_a_stream_is_counted(start_server: Starter, connect: Connector) -> None:
    server = start_server("--max-sessions-per-stream", "1", "--max-session-tokens", "3")
    wire = connect(server.endpoint)
    stream = wire.stream()
    answer = stream.ask(opens=[wire.open(1), wire.open(2)], step=wire.step([1], [[5, 6, 7, 8]]))
    assert {r.session for r in answer.refusals} == {1, 2}
    refusals = {
        what: server.metrics()[f'histospec_refusals_total{{what="{what}"}}'] for what in ("open", "step", "commit")
    }
    assert refusals == {"open": 1, "step": 1, "commit": 0}


def test_limits_are_shown_beside_what_is_used(start_server: Starter, connect: Connector) -> None:
    server = start_server("--memory", "64MiB", "--max-backlog", "3MiB")
    connect(server.endpoint).ingest([1], [[2]])
    samples = server.metrics()
    expected = {
        "ready": 1,
        "memory_budget_bytes": 64 << 20,
        "store_waiting_bytes": 0,
        "store_waiting_limit_bytes": 3 << 20,
    }
    assert {name: samples[f"histospec_{name}"] for name in expected} == expected
    assert samples["process_resident_memory_bytes"] < samples["histospec_memory_limit_bytes"]
    assert 0 < samples["histospec_event_loop_cpu_seconds_total"] <= samples["process_cpu_seconds_total"] + 1
    assert "histospec_certificate_expiry_timestamp_seconds" not in samples  # no TLS


def test_a_store_that_is_not_open_takes_no_other_metric_away() -> None:
    class Closed:
        def __getattr__(self, name: str) -> None:
            raise StoreError("store: it is not open yet")

    vitals = Vitals(Config(), cast(Store, Closed()), None, [], Tenants(Access(None), Engine(1 << 20)), lambda: False)
    names = {metric.name for metric in vitals.collect()}
    assert {"histospec_ready", "histospec_memory_limit_bytes", "histospec_log_lines_dropped"} <= names
    assert not any("store" in name for name in names)


def test_a_server_that_drains_is_not_ready(server: Server, wire: Wire) -> None:
    stream = wire.stream()
    stream.ask(opens=[wire.open(1)], step=wire.step([1], [[5]]))
    server.terminate()
    eventually(lambda: server.metrics()["histospec_ready"] == 0)
    stream.end()
    assert server.wait() == 0


def test_refused_rpcs_are_counted_by_code(server: Server, wire: Wire) -> None:
    for _ in range(3):
        stream = wire.stream()
        stream.send(step=pb.Step(sessions=b"1"))
        stream.error()
    assert server.metrics()['histospec_rpc_errors_total{code="INVALID_ARGUMENT",method="Draft"}'] == 3


def test_totals_never_fall_when_a_namespace_in_use_is_dropped(server: Server, wire: Wire) -> None:
    def totals() -> dict[str, float]:
        samples = server.metrics().items()
        return {k: v for k, v in samples if k.startswith("histospec_") and "_total" in k and "cpu_seconds" not in k}

    wire.ingest([1, 2, 3], [RESPONSE])
    stream = wire.stream()
    stream.ask(opens=[wire.open(1)], step=wire.step([1], [RESPONSE[:4]]))
    before = totals()
    wire.stub.DropNamespace(pb.DropNamespaceRequest(namespace="run"))
    assert totals() == before  # a session of the namespace is open: its counters stay
    wire.ingest([1, 2, 3], [RESPONSE])
    stream.ask(opens=[wire.open(2)], step=wire.step([2], [RESPONSE[:4]]))
    after = totals()
    hits = 'histospec_problem_lookups_total{namespace="run",result="hit"}'
    assert after[hits] == before[hits] + 1
    drafted = 'histospec_source_draft_tokens_total{namespace="run",source="history"}'
    assert after[drafted] > before[drafted] > 0
    assert all(after[name] >= value for name, value in before.items())


@pytest.mark.parametrize("forget", ["drop", "rewind", "both", "come and go"])
def test_totals_never_fall_whatever_is_forgotten(server: Server, wire: Wire, forget: str) -> None:
    """Totals of /status never fall; after a rewind, neither do those of /metrics, which lose dropped namespaces."""
    names = ("draft_tokens", "accepted_tokens", "generated_tokens", "lookups_hit")

    def totals() -> dict[str, float]:
        counted = json.loads(server.get("/status")[1])["totals"]
        return {name: counted[name] for name in names}

    def labelled() -> dict[str, float]:
        ours = ("drafts", "draft_tokens", "accepted_tokens", "generated_tokens", "problem_lookups")
        return {name: server.total(f"histospec_{name}_total", namespace="run") for name in ours}

    def draft() -> None:
        wire.ingest([1, 2, 3], [RESPONSE], epoch=0)
        stream = wire.stream()
        (drafted,) = wire.drafts(stream.ask(opens=[wire.open(1)], step=wire.step([1], [RESPONSE[:4]])))
        stream.ask(step=wire.step([1], [[*drafted, 900]], [4]))
        stream.ask(closes=[wire.commit(1, 5 + len(drafted))])
        stream.end()

    draft()
    before, shown = totals(), labelled()
    assert all(before.values())
    assert all(shown.values())
    if forget in ("rewind", "both"):
        wire.stub.Rewind(pb.RewindRequest(namespace="run", epoch=0))
        assert (totals(), labelled()) == (before, shown)
    if forget != "rewind":
        wire.stub.DropNamespace(pb.DropNamespaceRequest(namespace="run"))
    if forget == "come and go":
        draft()
        wire.stub.DropNamespace(pb.DropNamespaceRequest(namespace="run"))
        before = {name: 2 * value for name, value in before.items()}
    assert totals() == before
    gone = forget != "rewind"
    assert any('namespace="run"' in name for name in server.metrics()) is not gone
    assert bool(json.loads(server.get("/status")[1])["namespaces"]) is not gone


def test_names_that_never_existed_use_up_no_label(server: Server, wire: Wire) -> None:
    for number in range(20):
        name = f"absent-{number}"
        wire.stub.DropNamespace(pb.DropNamespaceRequest(namespace=name))
        wire.stub.Rewind(pb.RewindRequest(namespace=name, epoch=3))
        wire.stub.PredictLength(pb.PredictLengthRequest(namespace=name, prompt=wire.i32([1])))
        assert wire.history([1], namespace=name) == []
        wire.ingest([1], [], namespace=name, epoch=5)
    stream = wire.stream()
    stream.ask(step=wire.step([77], [[1]]))
    assert not any("namespace=" in name for name in server.metrics())
    assert json.loads(server.get("/status")[1])["namespaces_in_all"] == 0


@pytest.mark.parametrize("encoding", ["gzip", "identity"])
@pytest.mark.parametrize(
    ("accept", "kind", "last"),
    [
        ("", "text/plain", b"\n"),
        ("application/openmetrics-text;version=1.0.0,text/plain", "application/openmetrics-text", b"\n# EOF\n"),
    ],
)
def test_both_formats_are_served_compressed_where_that_is_asked_for(
    shared_server: Server, accept: str, kind: str, last: bytes, encoding: str
) -> None:
    headers = {"Accept": accept, "Accept-Encoding": encoding}
    request = urllib.request.Request(f"http://{shared_server.http}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        body = answer.read()
        assert answer.headers["Content-Type"].startswith(kind)
        assert (answer.headers["Content-Encoding"] == "gzip") is (encoding == "gzip")
        assert answer.headers["Vary"] == "Accept-Encoding"
    text = gzip.decompress(body) if encoding == "gzip" else body
    assert b"\nhistospec_ready 1.0\n" in text
    assert text.endswith(last)


def test_the_room_of_the_store_is_shown(start_server: Starter, connect: Connector) -> None:
    """
    1. Without --disk there is no limit; the volume is that of the directory, apart from other programs' writes.
    2. The size of stored data appears; with --disk, so does the limit. /status agrees.
    """
    unlimited = start_server("--disk", "0")
    samples = unlimited.metrics()
    volume = shutil.disk_usage(unlimited.data_dir)
    assert "histospec_store_limit_bytes" not in samples
    assert samples["histospec_disk_size_bytes"] == volume.total
    assert 0 < samples["histospec_disk_free_bytes"] < volume.total
    server = start_server("--disk", "64MiB")
    empty = server.metrics()["histospec_store_bytes"]
    assert empty > 0
    connect(server.endpoint).ingest([1], [range(number, number + 50_000) for number in range(20)])
    samples = server.metrics()
    assert samples["histospec_store_bytes"] > empty + 4 * 20 * 50_000
    assert samples["histospec_store_limit_bytes"] == 64 << 20
    status = json.loads(server.get("/status")[1])
    assert status["store_bytes"] == samples["histospec_store_bytes"]
    assert (status["store_limit_bytes"], status["disk_size_bytes"]) == (64 << 20, volume.total)


def test_a_later_verify_cost_does_not_change_the_speed_up_of_earlier_steps(server: Server, wire: Wire) -> None:
    """The batch grows until drafts no longer pay: the worker asks for none, and says what they would cost."""

    def speedup() -> float:
        (run,) = json.loads(server.get("/status")[1])["namespaces"]
        return float(run["gains"]["totals"]["speedup"])

    wire.ingest([1, 2, 3], [RESPONSE] * 3)
    stream = wire.stream()
    (draft,) = wire.drafts(stream.ask(opens=[wire.open(1)], step=wire.step([1], [RESPONSE[:1]], verify_cost=0.02)))
    stream.ask(step=wire.step([1], [[*draft, 900]], [1], max_tokens=0, verify_cost=0.02))
    before = speedup()
    assert before == pytest.approx((len(draft) + 2) / (1 + 0.02 * len(draft)))
    stream.ask(step=wire.step([1], [[901]], [2 + len(draft)], max_tokens=0, verify_cost=0.9))
    assert speedup() == pytest.approx((len(draft) + 3) / (2 + 0.02 * len(draft)))


def test_the_verify_cost_is_what_open_streams_say(server: Server, wire: Wire) -> None:
    """
    1. Three workers report the cost of a draft token: the metric is the median.
    2. One reports another cost: the median changes.
    3. One leaves: its report no longer counts. When all have left, there is no value.
    4. A namespace dropped during a stream has no value until the stream steps there again.
    """

    def shown() -> float | None:
        return server.metrics().get('histospec_verify_cost{namespace="run"}')

    def told(cost: float) -> bool:
        return shown() == float(np.float32(cost))

    streams = [wire.stream() for _ in range(3)]
    for stream, cost in zip(streams, (0.25, 0.5, 0.75), strict=True):
        stream.ask(opens=[wire.open(1)], step=wire.step([1], [[5]], verify_cost=cost))
    assert told(0.5)
    streams[0].ask(step=wire.step([1], [[6]], [1], verify_cost=1.5))
    assert told(0.75)
    streams[0].end()
    eventually(lambda: told(0.625))
    streams[1].cancel()
    eventually(lambda: told(0.75))
    streams[2].ask(closes=[pb.CloseSession(session=1)], step=wire.step([], []))
    wire.stub.DropNamespace(pb.DropNamespaceRequest(namespace="run"))
    streams[2].ask(opens=[wire.open(2)], step=wire.step([], []))
    assert shown() is None
    streams[2].ask(step=wire.step([2], [[5]], verify_cost=0.125))
    assert told(0.125)
    streams[2].end()
    eventually(lambda: shown() is None)


def test_every_reason_for_an_eviction_is_counted_for_itself(start_server: Starter, connect: Connector) -> None:
    """A full window evicts as many responses as arrive, which is not by memory; rewound ones are not evicted."""

    def reasons(*flags: str, rewind: bool = False) -> dict[str, bool]:
        server = start_server("--namespace-tokens", "0", *flags)
        wire = connect(server.endpoint)
        for number in range(40):
            wire.ingest([1, 2, 3], [range(number, number + 5000)], epoch=number // 2)
        if rewind:
            wire.stub.Rewind(pb.RewindRequest(namespace="run", epoch=3))
        names = ("memory", "epochs", "responses")
        return {name: server.total("histospec_evicted_responses_total", reason=name) > 0 for name in names}

    assert reasons("--memory", "1MiB", "--history-epochs", "99") == {
        "memory": True, "epochs": False, "responses": False,
    }  # fmt: skip
    assert reasons("--history-epochs", "4") == {"memory": False, "epochs": True, "responses": False}
    assert reasons("--history-epochs", "99", "--history-responses", "8") == {
        "memory": False, "epochs": False, "responses": True,
    }  # fmt: skip
    assert reasons("--history-epochs", "99", rewind=True) == dict.fromkeys(("memory", "epochs", "responses"), False)
