"""With the demo's policy, a step of SGLang yields as many tokens as one of vLLM with the same server."""

import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sglang.conftest import NGRAM, Engine
from tests.support.servers import Server

PROBLEMS, VISITS, DRAFTED = 24, 3, 16
ENVIRONMENT = {"HISTOSPEC_DEADLINE": "5", "HISTOSPEC_VERIFY_COST": "0.05"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's policy, as a transformers folder."""
    from examples.tiny_rl import policy

    path = tmp_path_factory.mktemp("demo-policy")
    policy.load().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def problems() -> list[list[int]]:
    """Prompts of the demo's task."""
    from examples.tiny_rl import task

    return [problem.prompt for problem in task.problems(PROBLEMS, random.Random(7))]


@pytest.fixture
def in_vllm(
    folder: Path, problems: list[list[int]], shared_server: Server, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[float]]:
    """Tokens per step of each visit of the problems through vLLM."""
    names = {"HISTOSPEC_ENDPOINT": shared_server.endpoint, "HISTOSPEC_NAMESPACE": "demo-in-vllm"}
    for name, value in (ENVIRONMENT | names | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}).items():
        monkeypatch.setenv(name, value)
    from examples.tiny_rl.rollout import DRAFTS, RolloutEngine

    engine = RolloutEngine(folder, 16, DRAFTS)
    yield [engine.generate(problems, samples=1, epoch=visit, temperature=0).tokens_per_step for visit in range(VISITS)]
    engine.llm.llm_engine.engine_core.engine_core.scheduler.shutdown()


def test_tokens_per_step(
    start_engine: Callable[..., Engine],
    folder: Path,
    problems: list[list[int]],
    shared_server: Server,
    in_vllm: list[float],
) -> None:
    from examples.tiny_rl.task import END_ID, LONGEST

    places = NGRAM | {"speculative_num_draft_tokens": DRAFTED + 1}
    engine = start_engine(
        shared_server.endpoint, ENVIRONMENT, model_path=str(folder), skip_tokenizer_init=True, **places
    )
    in_sglang = []
    for _ in range(VISITS):
        engine.start(problems, max_new_tokens=LONGEST, stop_token_ids=[END_ID], ignore_eos=False)
        answers = engine.wait()
        # SGLang does not count the step that reads the prompt, vLLM does.
        steps = sum(answer["meta_info"]["spec_verify_ct"] + 1 for answer in answers)
        in_sglang.append(sum(len(answer["output_ids"]) for answer in answers) / steps)
    logging.getLogger(__name__).info("tokens per step: vLLM %s, SGLang %s", in_vllm, in_sglang)
    assert in_sglang == pytest.approx(in_vllm, rel=0.03)
    assert in_sglang[1] > 2 * in_sglang[0]
