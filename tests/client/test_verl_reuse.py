"""SPEC-RL in verl without verl: old responses that the model cannot score do not end a run."""

import importlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest

from histospec.client import AsyncDraftClient, Response
from histospec.client.config import Timeouts
from tests.support.servers import Server

VOCABULARY = 1000
PROMPT = [1, 2, 3]


@dataclass
class Output:
    token_ids: list[int]
    log_probs: list[float] | None
    stop_reason: str | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module with the classes of verl that it takes from `interface`, which are not called here."""
    interface = ModuleType("interface")
    for name in ("AgentLoopManager", "AgentLoopWorker", "SingleTurnAgentLoop", "Tracking"):
        setattr(interface, name, type(name, (), {"log": None}))
    for name in ("copy_to_local", "get_generation_config", "remote"):
        setattr(interface, name, lambda value: value)
    interface.TokenOutput = Output  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "histospec.client.verl.interface", interface)
    before = set(sys.modules)
    yield importlib.import_module("histospec.client.verl.speculative")
    for name in set(sys.modules) - before:
        if name.startswith("histospec.client.verl"):
            del sys.modules[name]


class Llm:
    """A server of vLLM whose policy gives every token this log-probability."""

    def __init__(self, logprob: float, rows: int = 1 << 20) -> None:
        self.logprob = logprob
        self.rows = rows

    async def generate(self, request_id: str, *, prompt_ids: list[int], **others: Any) -> Output:
        if max(prompt_ids) >= VOCABULARY:
            raise ValueError(f"Token id {max(prompt_ids)} is out of vocabulary")
        scores = [[self.logprob]] * min(len(prompt_ids), self.rows)
        return Output([7, 8], [-0.1, -0.1], "completed", {"prompt_logprobs": scores})


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("token", "llm", "reused"),
    [
        (5, Llm(-0.1), 3),
        (123456, Llm(-0.1), 0),
        (5, Llm(math.nan), 0),
        (5, Llm(-0.1, rows=4), 0),
    ],
    ids=["well", "a token of another model", "a policy that diverges", "too few scores"],
)
async def test_what_cannot_be_scored_is_not_reused(
    adapter: Any, shared_server: Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest,
    token: int, llm: Llm, reused: int,
) -> None:  # fmt: skip
    timeouts = Timeouts(step=60.0, call=60.0, shutdown=60.0)
    async with AsyncDraftClient(shared_server.endpoint, request.node.name, timeouts=timeouts) as client:
        await client.ingest(PROMPT, [Response([4, token, 6], logprobs=[-0.1] * 3)], 0, "p")
        monkeypatch.setattr(adapter.history, "client", lambda: client)
        server = adapter.SpeculativeServer(llm, 1.0, 16, 1000, frozenset(), VOCABULARY)
        sampling = {"temperature": 1.0, "top_p": 1, "top_k": -1, "extra_args": {"histospec": {"problem": "p"}}}
        output = await server.generate("r", prompt_ids=PROMPT, sampling_params=sampling)
    assert output.extra_fields["reused_tokens"] == reused
    assert output.token_ids == [*[4, token, 6][:reused], 7, 8]
