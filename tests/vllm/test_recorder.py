"""HISTOSPEC_RECORD in a vLLM worker: the file has the engine's responses, and replays like those rollouts."""

import json
from pathlib import Path

import pytest

pytest.importorskip("histospec.replay", reason="this environment has the client only")

from histospec.replay import command as replay
from tests.support.engines import Prompts, StartEngine
from tests.support.servers import Server

pytestmark = [pytest.mark.vllm, pytest.mark.newest]


def test_a_run_with_changing_weights_records_its_rollouts(
    engine: StartEngine, shared_server: Server, prompts: Prompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, same = tmp_path / "rollouts.jsonl", tmp_path / "same.jsonl"
    monkeypatch.setenv("HISTOSPEC_RECORD", str(file))
    rollouts = engine(shared_server.endpoint)
    visits = []
    for seed in range(3):
        visits.append(rollouts.generate(prompts, temperature=0.7, seed=seed, n=1))
        rollouts.llm.reset_prefix_cache()  # as a trainer does when it has changed the weights
    rollouts.close()

    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(found) == 3 * len(prompts)
    assert {record["changes"] for record in found} == {0, 1, 2}
    for epoch, visit in enumerate(visits):
        for prompt, (response,) in zip(prompts, visit, strict=True):
            assert {"prompt": prompt, "tokens": response, "changes": epoch}.items() <= next(
                record for record in found if record["prompt"] == prompt and record["changes"] == epoch
            ).items()

    first = list(dict.fromkeys(prompts.index(record["prompt"]) for record in found))
    lines = [
        {
            "prompt": prompts[i],
            "responses": [{"epoch": epoch, "tokens": visit[i][0]} for epoch, visit in enumerate(visits)],
        }
        for i in first
    ]
    same.write_text("\n".join(map(json.dumps, lines)) + "\n")
    figures = []
    for path in (file, same):
        written = tmp_path / f"{path.stem}.json"
        assert replay.main([str(path), "--no-plot", "--json", str(written), "--limit", "0"]) == 0
        figures.append(json.loads(written.read_text()))
    assert figures[0]["last_visit"] == figures[1]["last_visit"]
    assert figures[0]["epochs"] == figures[1]["epochs"]
