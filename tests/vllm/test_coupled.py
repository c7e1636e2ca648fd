"""With coupled sampling, seeded output does not depend on drafts, and repeats with its seed."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support import apart, coupled_check
from tests.support.servers import Server

pytestmark = [pytest.mark.vllm, pytest.mark.v1]

LIMIT = 5  # standard deviations


def check(tiny_model: str, what: str, size: int, *more: Any, **environment: str) -> Any:
    """What a check of `coupled_check` found. A process samples coupled or it does not."""
    return apart.call(
        {"HISTOSPEC_SAMPLING": "coupled"} | environment, coupled_check.CHECKS[what], tiny_model, size, *more
    )


@pytest.mark.parametrize(("prompts", "length"), [(12, 100), pytest.param(200, 200, marks=pytest.mark.long)])
def test_drafts_change_no_token(tiny_model: str, prompts: int, length: int) -> None:
    """At temperature 1, with top-k, top-p, penalties and logprobs, in batches with requests that have no seed."""
    result = check(tiny_model, "same", prompts, length)
    assert result["tokens"] == length * prompts
    assert result["distinct"] > prompts
    assert result["again"] == length * (prompts // 4)  # alone in a smaller batch
    for drafts in ("none", "good", "wrong", "mixed"):
        assert result[drafts] == result["tokens"], drafts
    assert result["accepted good"] > 0.9 * result["tokens"]
    assert result["accepted none"] == 0
    assert result["accepted wrong"] < result["accepted mixed"] < result["accepted good"]


@pytest.mark.newest
@pytest.mark.parametrize("responses", [1000, pytest.param(20_000, marks=pytest.mark.long)])
def test_it_samples_what_vllm_samples(tiny_model: str, responses: int) -> None:
    """Plain, with top-p, with penalties."""
    result = check(tiny_model, "distribution", responses)
    assert len(result) == 9
    assert max(result.values()) < LIMIT, result


def test_a_seed_kept_is_a_response_again(tiny_model: str, server: Server) -> None:
    """The policy does not move, so every response whose seed is kept comes again, in a few long drafts."""
    settings = {"HISTOSPEC_ENDPOINT": server.endpoint, "HISTOSPEC_NAMESPACE": "twins", "HISTOSPEC_DEADLINE": "5"}
    settings |= {"HISTOSPEC_VERIFY_COST": "0.01"}
    result = check(tiny_model, "visits", 16, HISTOSPEC_SEED_REFRESH="0.25", **settings)
    assert result["responses"] == result["distinct"] == 64
    for again in result["again"]:
        assert 64 * 0.75 - 18 < again < 64  # five standard deviations
    metrics = server.metrics()
    assert metrics['histospec_twin_lookups_total{namespace="twins",result="hit"}'] == sum(result["again"])
    drafted, accepted = (
        metrics[f'histospec_source_{what}_tokens_total{{namespace="twins",source="twin"}}']
        for what in ("draft", "accepted")
    )
    assert accepted > 0.9 * drafted > 0


@pytest.mark.newest
@pytest.mark.long
@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_a_seed_gives_its_text_whoever_drafts(
    tiny_model: str, server: Server, drafter: Callable[..., Any], method: str
) -> None:
    settings = {"HISTOSPEC_ENDPOINT": server.endpoint, "HISTOSPEC_NAMESPACE": "twins", "HISTOSPEC_DEADLINE": "5"}
    settings |= {"HISTOSPEC_VERIFY_COST": "0.01", "HISTOSPEC_MODEL_DRAFT_TOKENS": "3"}
    result = check(tiny_model, "two_drafters", 40, json.dumps(drafter(method)), **settings)
    assert result["same"] == result["tokens"]
    assert result["distinct"] == 80  # each seed has a text of its own
    assert result["history"] > result["tokens"] / 4  # the second visit
    assert result["model"] > result["tokens"] / 20


def test_alternatives_reach_the_server(tiny_model: str, server: Server) -> None:
    """Those of every place, whether the token was drafted or sampled; and what users ask of vLLM stays."""
    settings = {"HISTOSPEC_ENDPOINT": server.endpoint, "HISTOSPEC_NAMESPACE": "alternatives", "HISTOSPEC_DEADLINE": "5"}
    result = check(tiny_model, "alternatives", 24, HISTOSPEC_VERIFY_COST="0.01", **settings)
    tokens = 3 * 24 * 200
    assert result["same"] == result["tokens"] == tokens
    assert result["logprobs"] == tokens / 2  # of half of the requests
    assert result["accepted"] > tokens / 4  # the second and third visit
    assert result["wrong"] == []
    assert result["places"] + result["none"] == tokens
    assert min(result["places"], result["none"]) > tokens / 20
