"""The lines for trainers, as they stand on the pages, with a server that answers, hangs and is gone.

A training step goes on in each case. Stubs stand for the trainers, with the names and values of their sources.
"""

import ast
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from histospec.client import DraftClient, Timeouts
from histospec.client.engines.options import read_options
from tests.docs.test_docs import INLINE, blocks
from tests.support.programs import ROOT
from tests.support.servers import Server, Starter

NAMESPACE = "trainer"
NAN = float("nan")
Scope = dict[str, Any]


def module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    """Makes a module importable, with the packages around it."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(parts[depth - 1]))
    made = ModuleType(parts[-1])
    vars(made).update(content)
    monkeypatch.setitem(sys.modules, name, made)


@pytest.fixture(params=["answers", "hangs", "is gone"])
def server(request: pytest.FixtureRequest, start_server: Starter, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The server that the examples find in their environment."""
    server = start_server()
    monkeypatch.setenv("HISTOSPEC_ENDPOINT", server.endpoint)
    monkeypatch.setenv("HISTOSPEC_NAMESPACE", NAMESPACE)
    server.state = request.param  # type: ignore[attr-defined]
    if request.param == "hangs":
        os.kill(server.pid, signal.SIGSTOP)
    elif request.param == "is gone":
        server.kill()
    yield server
    if request.param == "hangs":
        os.kill(server.pid, signal.SIGCONT)


@pytest.fixture
def run() -> Iterator[Callable[..., Scope]]:
    """run(block, ...) executes blocks of a page in one scope, and returns it; its clients end with the test."""
    scopes: list[Scope] = []

    def execute(*bodies: str, **names: Any) -> Scope:
        scopes.append(names)
        for body in bodies:
            exec(body, names)
        return names

    yield execute
    for scope in scopes:
        for value in scope.values():
            if isinstance(value, DraftClient):
                value.shutdown()


def block(page: str, *parts: str) -> str:
    """The only Python block of a page about trainers that has all of these parts."""
    (body,) = [body for body in blocks(f"docs/frameworks/{page}.md", "python") if all(part in body for part in parts)]
    return body


def stored(server: Server, prompt: list[int]) -> list[tuple[Any, ...]] | None:
    """What the server has of a problem: tokens, reward, epoch and whether there are log-probabilities; None if away."""
    if server.state != "answers":  # type: ignore[attr-defined]
        return None
    with DraftClient(server.endpoint, NAMESPACE, timeouts=Timeouts(call=60.0)) as client:
        return [(r.tokens.tolist(), r.reward, r.epoch, r.logprobs is not None) for r in client.history(prompt)]  # type: ignore[union-attr]


def test_skyrl(server: Server, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class SkyRLGymGenerator:
        async def generate(self, input_batch: Any) -> dict[str, Any]:
            return {
                "prompt_token_ids": [[1, 2], [1, 2], [1, 3]],
                "response_ids": [[4, 5], [6, 7], []],
                "rewards": [[0.0, 1.0], NAN, None],
                "loss_masks": [[1, 1], [1, 0], []],
                "rollout_logprobs": [[-1.0, -1.0], [-1.0, NAN], []],
                "rollout_metrics": None,
            }

    module(monkeypatch, "skyrl.train.generators.skyrl_gym_generator", SkyRLGymGenerator=SkyRLGymGenerator)
    scope = run(block("skyrl", "def keep("))
    metadata = SimpleNamespace(global_step=3)
    output = asyncio.run(scope["KeepingGenerator"]().generate({"batch_metadata": metadata}))
    asyncio.run(scope["KeepingGenerator"]().generate({"batch_metadata": None}))
    assert len(output["response_ids"]) == 3
    assert stored(server, [1, 2]) in (None, [([4, 5], 1.0, 3, True), ([6, 7], None, 3, False)] * 2)

    from histospec.client.rollouts import RolloutMetrics

    scope |= {"RolloutMetrics": RolloutMetrics, "output": output}
    lines = [body for body in blocks("docs/frameworks/skyrl.md", "python") if "class " not in body]
    for body in lines:
        exec(body, scope)
    assert isinstance(output["rollout_metrics"], dict)


def test_trl(server: Server, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module(
        monkeypatch,
        "transformers",
        AutoTokenizer=SimpleNamespace(
            from_pretrained=lambda name: (
                lambda texts: {"input_ids": [[ord(letter) for letter in text] for text in texts]}
            )
        ),
    )
    scope = run(block("trl", "client.keep("), score=lambda text: NAN if text == "bad" else 1.0)
    given = {"prompts": ["ab", "ab"], "completions": ["good", "bad"], "completion_ids": [[4], [5, 6]]}
    state = SimpleNamespace(global_step=2)
    assert scope["reward"](**given, trainer_state=state, answers=["x", "y"])[0] == 1.0
    assert stored(server, [97, 98]) in (None, [([4], 1.0, 2, False), ([5, 6], None, 2, False)])
    logged: dict[str, float] = {}
    scope = run(block("trl", "log_metric"))
    scope["reward"](completions=["good"], log_metric=logged.__setitem__, prompts=["ab"])
    assert all(name.startswith("histospec/") for name in logged)


def test_trl_with_lists_of_messages() -> None:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"?": 0, "what": 1, "why": 2, "answer:": 3}, "?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for message in messages %}{{ message.content }} {% endfor %}{{ 'answer:' if add_generation_prompt }}"
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template)
    page = (ROOT / "docs" / "frameworks" / "trl.md").read_text()
    (line,) = [code for code in INLINE.findall(page) if code.startswith("tokenizer.apply_chat_template(")]
    prompts = [[{"role": "user", "content": text}] for text in ("what", "why what")]
    assert eval(line, {"tokenizer": tokenizer, "prompts": prompts}) == [[1, 3], [2, 1, 3]]


def fields(files: str, name: str) -> set[str]:
    """The fields of a class in one of vLLM's source files."""
    vllm = find_spec("vllm")
    if vllm is None or vllm.origin is None:
        pytest.skip("needs vLLM")
    texts = [path.read_text() for path in Path(vllm.origin).parent.glob(files)]
    nodes = [node for text in texts if f"class {name}(" in text for node in ast.walk(ast.parse(text))]
    (found,) = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == name]
    return {
        node.target.id for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


@pytest.mark.parametrize(
    ("mode", "files", "name"),
    [
        ("colocate", "sampling_params.py", "SamplingParams"),
        ("server", "entrypoints/openai/**/protocol.py", "CompletionRequest"),
    ],
)
def test_trl_turns_commits_off_with_a_name_that_vllm_has(mode: str, files: str, name: str) -> None:
    """In colocate mode TRL makes `SamplingParams` of `generation_kwargs`; in server mode, a request over HTTP."""
    given = [
        eval(body, {"GRPOConfig": dict}) for body in blocks("docs/frameworks/trl.md", "python") if "GRPOConfig(" in body
    ]
    (config,) = [config for config in given if config.get("vllm_mode", "colocate") == mode]
    ((key, options),) = config["generation_kwargs"].items()
    assert key in fields(files, name)
    assert read_options(options, prompt_tokens=1).commit is False


def test_openrlhf(server: Server, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class SingleTurnAgentExecutor:
        def __init__(self, reward: str) -> None:
            assert reward == "reward.py"

        async def execute(self, prompt: str, label: str, sampling_params: Any, max_length: int) -> dict[str, Any]:
            return {
                "observation_tokens": [1, 2, 4, 5, 6],
                "action_ranges": [(2, 4), (4, 5)] if label else [],
                "rollout_log_probs": [0.0, 0.0, -1.0, -2.0, -3.0] if label == "good" else None,
                "reward": [0.5] if label == "good" else None,
                "extra_logs": {},
            }

    module(monkeypatch, "openrlhf.utils.agent", SingleTurnAgentExecutor=SingleTurnAgentExecutor)
    sampling = SimpleNamespace(extra_args=None)
    scope = run(block("openrlhf", "client.keep("))

    async def rollouts(executor: Any) -> list[Any]:
        labels = ("good", "bad", "")
        return [await executor.execute("text", label, sampling_params=sampling, max_length=9) for label in labels]

    assert len(asyncio.run(rollouts(scope["AgentExecutor"]()))) == 3
    assert sampling.extra_args == {"histospec": {"commit": False}}
    assert stored(server, [1, 2]) in (None, [([4, 5, 6], 0.5, 0, True), ([4, 5, 6], None, 0, False)])
    module(monkeypatch, "vllm", AsyncEngineArgs=lambda **arguments: arguments)
    scope = run(block("openrlhf", "custom_class"), block("openrlhf", "RolloutMetrics("))
    (output, *_) = asyncio.run(rollouts(scope["AgentExecutor"]()))
    assert set(output["extra_logs"]) >= {"histospec/accept_rate", "histospec/tokens_per_step"}
    assert sys.modules["vllm"].AsyncEngineArgs()["scheduler_cls"] == "histospec.client.vllm.HistoSpecScheduler"


def test_nemo_rl(server: Server, run: Any) -> None:
    logged: list[dict[str, float]] = []
    logger = SimpleNamespace(log_metrics=lambda metrics, step, prefix: logged.append(metrics))
    run(block("nemo-rl", "log_metrics"), logger=logger)
    logger.log_metrics({"reward": 1.0}, 1, prefix="train")
    assert logged[0]["reward"] == 1.0


def test_a_trainer_of_your_own(server: Server, run: Any) -> None:
    from histospec.client.rollouts import RolloutMetrics

    metrics: dict[str, float] = {}
    rows: dict[str, Any] = {"prompts": [[1]], "responses": [[2, 3]], "rewards": [NAN], "logprobs": None}
    names = {"DraftClient": DraftClient, "RolloutMetrics": RolloutMetrics, "client": DraftClient(), "metrics": metrics}
    run(block("README", "client.keep("), block("README", "RolloutMetrics("), **names, **rows, masks=None, step=7)
    assert stored(server, [1]) in (None, [([2, 3], None, 7, False)])


def test_no_page_about_trainers_shows_a_call_that_ends_them() -> None:
    for page in ("README", "skyrl", "trl", "openrlhf", "nemo-rl"):
        for body in blocks(f"docs/frameworks/{page}.md", "python"):
            assert not any(call in body for call in ("ingest(", "ingest_many(", "history("))
