"""The parts of the SGLang adapter that need no SGLang; tests/sglang has the rest."""

import importlib
import logging
import sys
from array import array
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from histospec.client import Draft
from histospec.client.errors import ConfigurationError
from histospec.client.sglang import adapter, places, plugin, settings
from histospec.client.sglang.adapter import SchedulerDrafts

PLACES, VOCABULARY = 4, 100


def draft(tokens: list[int], probs: list[float], others: list[int] | None = None, theirs: Any = ()) -> Draft:
    runners_up = None if others is None else (np.array(others, np.int32), np.array(theirs, np.float32))
    return Draft(np.array(tokens, np.int32), np.array(probs, np.float32), runners_up)


def filled(drafts: list[Draft | None], count: int = PLACES) -> tuple[list[list[int]], list[list[list[int]]]]:
    """The tokens and the masks of requests whose own places are 7, 1, 1, 1 and masks of ones."""
    tokens = np.array([[7, *[1] * (count - 1)]] * len(drafts), np.int64).reshape(-1)
    mask = np.ones(len(drafts) * count * count, np.int64)
    places.put(tokens, mask, places.choose(drafts, count, VOCABULARY), count)
    return tokens.reshape(-1, count).tolist(), mask.reshape(-1, count, count).tolist()


def test_a_draft_is_a_chain_behind_the_last_token() -> None:
    long = draft([30, 31, 32, 33, 34], [0.9] * 5)
    tokens, masks = filled([draft([10, 11, 12], [0.9] * 3), draft([20], [0.5]), None, long])
    assert tokens == [[7, 10, 11, 12], [7, 20, 20, 20], [7, 1, 1, 1], [7, 30, 31, 32]]
    chain, own = np.tri(PLACES).tolist(), np.ones((PLACES, PLACES)).tolist()
    assert masks == [chain, chain, own, chain]


def test_a_branch_takes_a_place_that_is_less_probable_to_be_reached() -> None:
    one = draft([10, 11, 12], [0.6, 0.9, 0.5], [20, -1, 22], [0.3, 0.0, 0.4])  # reached: 0.6, 0.54, 0.27; 0.3, 0.216
    none = draft([10, 11, 12], [0.6, 0.9, 0.5], [VOCABULARY, -1, 22], [0.3, 0.0, 0.4])
    short = draft([10], [0.6], [20], [0.3])
    tokens, masks = filled([one, none, short])
    assert tokens == [[7, 10, 11, 20], [7, 10, 11, 12], [7, 10, 10, 20]]
    branch = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
    assert masks == [branch, np.tri(PLACES).tolist(), branch]


@pytest.mark.parametrize("seed", range(20))
def test_the_places_that_are_most_probable_to_be_reached(seed: int) -> None:
    """A search through the whole tree finds the same places. No place is followed by one token twice."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 18))
    drafts: list[Draft | None] = []
    for _ in range(6):
        length = int(rng.integers(1, 25))
        drafted, others = rng.integers(0, 50, length), rng.integers(50, 110, length)
        probs, theirs = rng.random(length) * 0.8 + 0.1, rng.random(length) * 0.1
        drafts.append(draft(drafted.tolist(), probs.tolist(), others.tolist(), theirs.tolist()))
    drafts[int(rng.integers(6))] = None
    tokens, masks = filled(drafts, count)
    for one, row, mask in zip(drafts, tokens, masks, strict=True):
        if one is None:
            continue
        assert one.runners_up is not None
        nodes = []  # probability to be reached, path of tokens
        reached, path = 1.0, [7]
        for place in range(len(one)):
            other = int(one.runners_up[0][place])
            if other < VOCABULARY:
                nodes.append((reached * one.runners_up[1][place], [*path, other]))
            reached *= one.probs[place]
            path = [*path, int(one.tokens[place])]
            nodes.append((reached, path))
        best = [path for _, path in sorted(nodes, key=lambda node: -node[0])[: count - 1]]
        paths = [[row[i] for i in range(count) if mask[place][i]] for place in range(1, count)]
        assert all(path in paths for path in best)
        assert all(path[-1] == path[-2] for path in paths if path not in best)  # they go on where the chain ends
        followed = [(str(path[:-1]), path[-1]) for path in paths]
        assert len(set(followed)) == len(followed)


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HISTOSPEC_ENDPOINT", "127.0.0.1:9")
    monkeypatch.setenv("HISTOSPEC_NAMESPACE", "run-1")


def server_args(**differently: Any) -> Any:
    usual = {
        "speculative_algorithm": None, "is_embedding": False, "disaggregation_mode": "null", "pp_size": 1, "nnodes": 1,
        "enable_dp_attention": False, "max_running_requests": None, "speculative_accept_threshold_single": 1.0,
        "speculative_accept_threshold_acc": 1.0, "speculative_ngram_max_bfs_breadth": 10,
    }  # fmt: skip
    return SimpleNamespace(**usual | differently)


@pytest.mark.usefixtures("endpoint")
def test_the_arguments_are_filled_in(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("HISTOSPEC_DRAFT_TOKENS", "8")
    arguments = server_args()
    settings.fill_in(arguments)
    assert arguments.speculative_algorithm == "NGRAM"
    assert (arguments.speculative_num_draft_tokens, arguments.speculative_ngram_max_bfs_breadth) == (9, 1)
    assert arguments.disable_overlap_schedule is True
    assert "SGLang runs 48 requests at once unless max_running_requests" in caplog.text


@pytest.mark.usefixtures("endpoint")
@pytest.mark.parametrize(
    ("differently", "why"),
    [
        ({"speculative_algorithm": "EAGLE3"}, "speculative_algorithm is set and wins: EAGLE3"),
        ({"is_embedding": True}, "is_embedding is set"),
        ({"disaggregation_mode": "decode"}, "disaggregation_mode is 'decode'"),
        ({"enable_dp_attention": True}, "enable_dp_attention is set"),
        ({"pp_size": 2}, "pp_size is 2; must be 1"),
    ],
)
def test_arguments_of_the_user_win(differently: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture) -> None:
    arguments = server_args(**differently)
    settings.fill_in(arguments)
    assert arguments == server_args(**differently)
    (line,) = caplog.messages
    assert line.startswith("HistoSpec: HISTOSPEC_ENABLE is 1, but this engine starts WITHOUT drafts from the server: ")
    assert why in line


def test_without_an_endpoint_the_engine_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HISTOSPEC_ENDPOINT", raising=False)
    with pytest.raises(ConfigurationError, match=r"HISTOSPEC_ENABLE is 1, but endpoint: .*HISTOSPEC_ENDPOINT"):
        settings.fill_in(server_args())


def scheduler(arguments: Any = None, **differently: Any) -> Any:
    usual = {
        "server_args": arguments or server_args(speculative_algorithm="NGRAM"), "enable_overlap": False,
        "is_generation": True, "spec_algorithm": SimpleNamespace(is_ngram=lambda: True),
        "draft_worker": SimpleNamespace(draft_token_num=PLACES), "model_config": SimpleNamespace(vocab_size=100),
    }  # fmt: skip
    return SimpleNamespace(**usual | differently)


@pytest.mark.usefixtures("endpoint")
@pytest.mark.parametrize(
    ("differently", "why"),
    [
        ({}, None),
        ({"enable_overlap": True}, "set disable_overlap_schedule"),
        ({"spec_algorithm": SimpleNamespace(is_ngram=lambda: False)}, "set it to NGRAM"),
        ({"arguments": server_args(nnodes=2)}, "nnodes is 2; must be 1"),
        ({"arguments": server_args(speculative_accept_threshold_acc=0.9)}, "would not be the model's own"),
    ],
)
def test_a_scheduler_says_why_it_does_not_draft(
    differently: dict[str, Any], why: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    assert settings.drafts_here(scheduler(**differently)) is (why is None)
    assert len(caplog.messages) == (why is not None)
    assert all(why in line for line in caplog.messages if why)


def test_an_sglang_without_an_endpoint_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HISTOSPEC_ENDPOINT", raising=False)
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"{name} is imported"))
    plugin.register()


@pytest.mark.usefixtures("endpoint")
def test_an_sglang_that_lacks_a_function_starts_without_drafts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = SimpleNamespace(BEFORE="before", AFTER="after", AROUND="around")
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins.hook_registry", plugin.MODULE):
        module: Any = ModuleType(name)
        module.__path__, module.HookType = [], kinds  # and no HookRegistry
        monkeypatch.setitem(sys.modules, name, module)
    plugin.register()
    (line,) = caplog.messages
    assert "HistoSpec: this SGLang has no sglang.srt.managers.scheduler.Scheduler.__init__, " in line
    assert "start WITHOUT drafts from the server" in line


def test_a_worker_that_cannot_load_weights_is_told_of_them_without_an_error() -> None:
    """As NGRAMWorker of 0.5.15, which knows only weights from tensors."""

    class Worker:
        def update_weights_from_tensor(self, update: object) -> tuple[bool, str]:
            return False, "its own"

    plugin._accept_weights(Worker)
    worker: Any = Worker()
    assert worker.update_weights_from_tensor(None) == (False, "its own")
    assert worker.update_weights_from_disk(None) == worker.update_weights_from_ipc(None) == (True, "")


class Broken:
    """Takes the place of a DraftClient, of which each call fails."""

    config = SimpleNamespace(namespace="run-1")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} is broken")


def request(rid: str = "1", **differently: Any) -> Any:
    usual = {
        "rid": rid, "origin_input_ids_unpadded": array("q", [1, 2, 3]), "output_ids": array("q", [4]),
        "output_ids_through_stop": array("q", [4]), "return_logprob": False, "logprob_start_len": -1,
        "sampling_params": SimpleNamespace(max_new_tokens=9, custom_params=None), "input_embeds": None,
        "to_finish": None, "finished_reason": None, "finished": lambda: False,
    }  # fmt: skip
    return SimpleNamespace(**usual | differently)


def test_a_failure_never_stops_the_engine(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(adapter, "DraftClient", Broken)
    caplog.set_level(logging.INFO)
    drafts = SchedulerDrafts(scheduler())
    batch = SimpleNamespace(reqs=[request()])
    drafts.queued(batch.reqs[0])
    drafts.choosing()
    assert (drafts.drafts(batch)[0] == places.NONE).all()
    drafts.processed(batch.reqs)
    drafts.aborted(batch.reqs[0])
    drafts.new_weights("step7")
    drafts.shut_down()
    assert any("could not open" in line for line in caplog.messages)
