"""`histospec bench` against real servers."""

import json
import subprocess
import sys

import pytest

SMALL = ["--batch", "8", "--steps", "5", "--problems", "4", "--responses", "3", "--siblings", "4", "--length", "80"]


def bench(*arguments: str, **options):
    command = [sys.executable, "-m", "histospec.server", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def test_figures_of_a_running_service(start_server, tmp_path):
    servers = [start_server(), start_server()]
    endpoint, http = (",".join(getattr(s, name) for s in servers) for name in ("endpoint", "http"))
    options = ["--workers", "2", "--deadline", "5", "--http", http, "--json", "-"]
    done = bench(endpoint, *SMALL, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["late_share"] == 0
    assert figures["tokens_per_step"] > 1.3  # it drafts, and from the history
    assert figures["step_p50_ms"] <= figures["step_p99_ms"] <= figures["step_p999_ms"]
    assert figures["drafted_per_step"] >= figures["tokens_per_step"] - 1  # what was right had been drafted
    assert figures["server_cpu_ms_per_step"] > 0
    assert figures["ingest_cpu_ns_per_token"] > 0
    assert "tokens a session and step" in done.stderr
    metrics = [server.metrics() for server in servers]
    assert sum(m["histospec_ingested_responses_total"] for m in metrics) == 12
    assert sum(m["histospec_generated_tokens_total"] for m in metrics) > 2 * 8 * 5
    assert all(m["histospec_history_tokens"] == 0 for m in metrics)  # it cleans up


def test_recorded_rollouts(start_server, tmp_path):
    recording = tmp_path / "recorded.jsonl"
    text = list(range(60))
    lines = [
        {"prompt": [p], "responses": [{"epoch": e, "tokens": [p + t for t in text]} for e in (0, 0, 1)]}
        for p in range(3)
    ]
    recording.write_text("\n".join(map(json.dumps, lines)))
    server = start_server()
    options = ["--rollouts", str(recording), "--deadline", "5", "--json", "-"]
    done = bench(server.endpoint, *SMALL, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens_per_step"] > 3
    assert server.metrics()["histospec_ingested_responses_total"] == 6


def test_ingests_of_some_responses(start_server, tmp_path):
    server = start_server()
    done = bench(server.endpoint, *SMALL, "--together", "2", "--deadline", "5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    metrics = server.metrics()
    assert metrics["histospec_ingested_responses_total"] == 12
    assert metrics['histospec_rpc_seconds_count{method="Ingest"}'] == 8  # 4 problems of 2 + 1


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["127.0.0.1:9", *SMALL], 1, "histospec bench: "),
        (["nowhere"], 2, "endpoint: 'nowhere' is not of the form host:port"),
        (["127.0.0.1:9", "--batch", "0"], 2, "--batch: must be at least 1, is 0"),
        (["127.0.0.1:9", "--together", "0"], 2, "--together: must be at least 1, is 0"),
        (["127.0.0.1:9", "--rollouts", "absent.jsonl"], 2, "absent.jsonl: no such file"),
    ],
)
def test_what_goes_wrong_is_one_sentence(tmp_path, arguments, code, sentence):
    done = bench(*arguments, cwd=tmp_path)
    assert done.returncode == code
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
