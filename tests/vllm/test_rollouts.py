"""SPEC-RL with real vLLM and a real server: reused and generated tokens, and the history afterwards."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from histospec.client import Response
from histospec.client.rollouts import SpeculativeRollout, accept_prefix, sampling
from tests.support.engines import MakeClient, Prompts, StartEngine, listening
from tests.support.servers import Server

pytestmark = pytest.mark.vllm

LENGTH = 24
VOCABULARY = 32  # of the tiny model
PEERS = 4


@pytest.fixture
def parameters() -> Callable[..., Any]:
    """parameters(**changes) -> SamplingParams of a rollout."""

    def make(**changes: Any) -> Any:
        from vllm import SamplingParams

        return SamplingParams(**({"temperature": 1, "max_tokens": LENGTH, "n": PEERS, "detokenize": False} | changes))

    return make


@pytest.fixture
def speculative(engine: StartEngine, shared_server: Server, make_client: MakeClient) -> Callable[..., Any]:
    """speculative(lenience) -> (SpeculativeRollout on an engine with drafts, its client)."""

    def make(lenience: Any = 1.0, seed: Any = 0, **arguments: Any) -> Any:
        client = make_client(shared_server.endpoint)
        return SpeculativeRollout(engine(shared_server.endpoint, **arguments).llm, client, lenience, seed=seed), client

    return make


@pytest.fixture
def other_policy(tiny_model: str, tmp_path: Path) -> str:
    """Directory of a policy a little way from that of `tiny_model`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        for weights in model.parameters():
            weights += 0.05 * weights.std() * torch.randn_like(weights)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path)
    return str(tmp_path)


def logprobs_of(model: str, prompt: Any, tokens: Any) -> Any:
    """float64[n]: log-probability of each token, from transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model)
    text = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        scores = policy(text).logits[0].double().log_softmax(-1)
    return scores[torch.arange(len(prompt) - 1, text.shape[1] - 1), text[0, len(prompt) :]].numpy()


def texts(rollouts: Any) -> Any:
    return [r.tokens.tolist() for r in rollouts]


def test_the_same_policy_reuses_everything(
    speculative: Callable[..., Any], prompts: Prompts, parameters: Callable[..., Any]
) -> None:
    rollout, _ = speculative()
    first = rollout.generate(prompts, parameters(), epoch=0, use_tqdm=False)
    assert len(first) == len(prompts) * PEERS
    assert rollout.report.reused_tokens == 0
    assert rollout.report.generated_tokens == len(first) * LENGTH
    second = rollout.generate(prompts, parameters(), epoch=1, use_tqdm=False)
    report = rollout.report
    assert (report.generated_tokens, report.share_reused, report.lenience) == (0, 1.0, 1.0)
    assert report.whole == report.tried == report.rollouts == len(second)
    for start in range(0, len(first), PEERS):  # every old response once, whatever the order
        assert sorted(texts(first[start : start + PEERS])) == sorted(texts(second[start : start + PEERS]))
    assert all((r.reused, r.generated, r.finish_reason, r.old_epoch) == (LENGTH, 0, "length", 0) for r in second)


def test_another_policy_cuts_and_scores_as_the_paper_says(
    speculative: Callable[..., Any],
    other_policy: str,
    tiny_model: str,
    prompts: Prompts,
    parameters: Callable[..., Any],
) -> None:
    """What is kept, and every logprob, follows from transformers' view of the two policies."""
    rollout, client = speculative(model=other_policy)
    writer, _ = speculative(seed=0)
    old = writer.generate(prompts, parameters(n=1), epoch=0, use_tqdm=False)
    reader = SpeculativeRollout(rollout.llm, client, seed=5)
    new = reader.generate(prompts, parameters(n=1), epoch=1, use_tqdm=False)
    draws = np.random.default_rng(5)
    for before, after in zip(old, new, strict=True):
        kept = accept_prefix(
            logprobs_of(other_policy, before.prompt, before.tokens),
            logprobs_of(tiny_model, before.prompt, before.tokens),
            1.0,
            draws.random(len(before.tokens)),
        )
        assert after.reused == kept
        assert after.tokens[:kept].tolist() == before.tokens[:kept].tolist()
        assert len(after.tokens) == len(after.logprobs) == after.reused + after.generated == LENGTH
        assert np.allclose(after.logprobs, logprobs_of(other_policy, after.prompt, after.tokens), atol=1e-4)
        assert np.allclose(before.logprobs, logprobs_of(tiny_model, before.prompt, before.tokens), atol=1e-4)
    assert reader.report is not None
    assert 0.05 < reader.report.share_reused < 0.95


def test_an_old_response_with_a_token_outside_the_vocabulary_is_skipped(
    speculative: Callable[..., Any], prompts: Prompts, parameters: Callable[..., Any]
) -> None:
    rollout, client = speculative(math.inf)
    old = rollout.generate(prompts, parameters(n=1), epoch=0, use_tqdm=False)
    for response, token in zip(old[:2], (VOCABULARY, 2**31 - 1), strict=True):
        foreign = response.tokens.copy()
        foreign[7] = token
        client.ingest(response.prompt, [Response(foreign, response.logprobs)], epoch=1)  # newer than the good one
    with listening() as lines:
        for _ in range(2):
            new = rollout.generate(prompts, parameters(n=1), epoch=2, ingest=False, use_tqdm=False)
    assert texts(new) == texts(old)  # the good responses are reused as a whole
    assert rollout.report.foreign == 2
    (line,) = [line for line in lines if "such responses are not reused" in line]
    assert f"has the token {VOCABULARY}, and the model has {VOCABULARY} tokens" in line


@pytest.mark.newest
def test_the_rejected_token_is_where_it_is_cut(
    speculative: Callable[..., Any], prompts: Prompts, parameters: Callable[..., Any]
) -> None:
    rollout, client = speculative()
    old = rollout.generate(prompts, parameters(n=1), epoch=0, ingest=False, use_tqdm=False)
    cuts = [i % LENGTH for i in range(len(prompts))]
    for response, place in zip(old, cuts, strict=True):
        logprobs = response.logprobs - 1  # the old policy liked all of them less, ...
        logprobs[place] += 40  # ... but this one much more
        client.ingest(response.prompt, [Response(response.tokens, logprobs)], epoch=0)
    new = rollout.generate(prompts, parameters(n=1), epoch=1, use_tqdm=False)
    assert [r.reused for r in new] == cuts
    assert all(r.generated == LENGTH - r.reused for r in new)


@pytest.mark.newest
def test_infinite_lenience_generates_the_ends_alone(
    speculative: Callable[..., Any], prompts: Prompts, parameters: Callable[..., Any]
) -> None:
    rollout, _ = speculative(math.inf)
    short = rollout.generate(prompts, parameters(max_tokens=LENGTH // 2), epoch=0, use_tqdm=False)
    long = rollout.generate(prompts, parameters(), epoch=1, use_tqdm=False)
    assert {(r.reused, r.generated) for r in long} == {(LENGTH // 2, LENGTH - LENGTH // 2)}
    again = rollout.generate(prompts, parameters(), epoch=2, use_tqdm=False)
    assert {(r.reused, r.generated) for r in again} == {(LENGTH, 0)}
    # A limit that has become shorter cuts, and what it cuts is complete.
    rollout.generate(prompts, parameters(max_tokens=5), epoch=3, use_tqdm=False)
    assert (rollout.report.reused_tokens, rollout.report.generated_tokens) == (5 * len(short), 0)


@pytest.mark.newest
def test_stop_tokens(speculative: Callable[..., Any], prompts: Prompts, parameters: Callable[..., Any]) -> None:
    rollout, _ = speculative(math.inf)
    long = rollout.generate(prompts, parameters(n=1), epoch=0, use_tqdm=False)
    stop = int(long[0].tokens[7])
    ends = [next((i + 1 for i, t in enumerate(r.tokens) if t == stop), LENGTH) for r in long]
    stopped = rollout.generate(prompts, parameters(n=1, stop_token_ids=[stop]), epoch=1, use_tqdm=False)
    assert [len(r.tokens) for r in stopped] == [r.reused for r in stopped] == ends
    assert [r.finish_reason for r in stopped] == ["stop" if end < LENGTH else "length" for end in ends]
    least = parameters(n=1, stop_token_ids=[stop], min_tokens=LENGTH)  # too early for a stop: it is written anew
    rewritten = rollout.generate(prompts, least, epoch=2, use_tqdm=False)
    assert [r.reused for r in rewritten] == [
        e - 1 if r.finish_reason == "stop" else LENGTH for e, r in zip(ends, stopped, strict=True)
    ]
    assert all(len(r.tokens) == LENGTH and stop not in r.tokens[: LENGTH - 1] for r in rewritten if r.generated)


@pytest.mark.newest
def test_the_end_of_the_model(speculative: Callable[..., Any], parameters: Callable[..., Any]) -> None:
    """vLLM scores nothing that fills the model: the last token is generated again."""
    prompt = [1, 2, 3] * 30
    rollout, _ = speculative(math.inf, max_model_len=128)
    for epoch in range(2):
        (r,) = rollout.generate([prompt], parameters(n=1, max_tokens=None), epoch=epoch, use_tqdm=False)
        assert (len(r.tokens), r.reused) == (38, 37 if epoch else 0)


@pytest.mark.newest
def test_the_history_holds_each_rollout_once(
    speculative: Callable[..., Any], prompts: Prompts, parameters: Callable[..., Any]
) -> None:
    """The adapter drafts for the ends, but what it sees is not a whole response: it commits nothing."""
    rollout, client = speculative(seed=3)
    old = rollout.generate(prompts, parameters(), epoch=0, ingest=False, use_tqdm=False)
    assert all(client.history(prompt) == [] for prompt in prompts)
    assert rollout.commit(old, rewards=lambda r: float(r.tokens[0])) == len(old)
    for i, prompt in enumerate(prompts):
        mine, held = old[i * PEERS : (i + 1) * PEERS], client.history(prompt)
        assert texts(held) == texts(mine)
        assert all(np.array_equal(a.logprobs, b.logprobs) for a, b in zip(held, mine, strict=True))
        assert [(r.epoch, r.reward) for r in held] == [(0, float(r.tokens[0])) for r in mine]


@pytest.mark.newest
def test_drafts_for_the_ends(engine: StartEngine, shared_server: Server, namespace: str, prompts: Prompts) -> None:
    """A greedy model repeats itself, so all drafts are right, if the ends are drafted from the problem's history."""
    rollouts = engine(shared_server.endpoint)
    whole = [group[0] for group in rollouts.generate(prompts)]
    before = rollouts.counter("spec_decode_num_accepted_tokens"), rollouts.verified
    kept = 10
    options = [{"histospec": {"generated": kept, "commit": False}}] * len(prompts)
    continued = [[*p, *w[:kept]] for p, w in zip(prompts, whole, strict=True)]
    ends = rollouts.generate(continued, extra_args=options, max_tokens=40 - kept)
    assert [group[0] for group in ends] == [w[kept:] for w in whole]
    assert rollouts.counter("spec_decode_num_accepted_tokens") > before[0]
    assert rollouts.verified - before[1] < len(prompts) * (40 - kept) / 2
    hits = f'histospec_problem_lookups_total{{namespace="{namespace}",result="hit"}}'
    assert shared_server.metrics()[hits] == len(prompts)


@pytest.mark.newest
def test_a_continued_request_may_commit_the_whole(
    engine: StartEngine, shared_server: Server, prompts: Prompts, make_client: MakeClient
) -> None:
    rollouts = engine(shared_server.endpoint)
    flat = [{"histospec.generated": 2, "histospec_epoch": 4}] * len(prompts)
    ends = rollouts.generate(prompts, extra_args=flat)
    rollouts.generate(prompts, extra_args={"histospec_generated": 2, "histospec.commit": "false"})
    client = make_client(shared_server.endpoint)
    for prompt, (end,) in zip(prompts, ends, strict=True):
        if len(prompt) > 2:
            (held,) = [r for r in client.history(prompt[:-2]) if list(r.tokens) == [*prompt[-2:], *end]]
            assert held.epoch == 4


@pytest.mark.newest
def test_options_that_leave_no_prompt_are_ignored(
    engine: StartEngine, shared_server: Server, prompts: Prompts, make_client: MakeClient
) -> None:
    rollouts = engine(shared_server.endpoint)
    written = rollouts.generate(prompts, extra_args={"histospec": {"generated": 99, "commit": "perhaps"}})
    client = make_client(shared_server.endpoint)
    assert [tokens for p in prompts for tokens in texts(client.history(p))] == [group[0] for group in written]


@pytest.mark.newest
def test_a_server_that_is_gone_costs_history_only(
    engine: StartEngine, server: Server, make_client: MakeClient, prompts: Prompts, parameters: Callable[..., Any]
) -> None:
    rollout = SpeculativeRollout(engine(server.endpoint).llm, make_client(server.endpoint), seed=0)
    rollout.generate(prompts, parameters(), epoch=0, use_tqdm=False)
    server.kill()
    with listening() as lines:
        new = rollout.generate(prompts, parameters(), epoch=1, use_tqdm=False)
        assert [len(r.tokens) for r in new] == [LENGTH] * len(prompts) * PEERS
        assert rollout.report is not None
        assert (rollout.report.reused_tokens, rollout.report.unreachable) == (0, len(prompts))
        assert rollout.commit(new) == 0
    said = [line.split()[1] for line in lines if "not asked again" in line]
    assert said == ["History", "Ingest", "Ingest"]  # once a batch, not once a prompt
    server.restart()
    assert rollout.commit(new) == len(new)
    rollout.generate(prompts, parameters(), epoch=2, use_tqdm=False)
    assert rollout.report.share_reused == 1


@pytest.mark.newest
def test_siblings_differ_whatever_the_seed(
    engine: StartEngine, nowhere: str, make_client: MakeClient, prompts: Prompts, parameters: Callable[..., Any]
) -> None:
    """Without drafts, which use random numbers up."""
    llm, client = engine().llm, make_client(nowhere)
    visits = []
    for _ in range(2):
        rollout = SpeculativeRollout(llm, client, 0)
        visits += [rollout.generate(prompts, parameters(seed=7), ingest=False, use_tqdm=False) for _ in range(2)]
    for i in range(0, len(visits[0]), PEERS):
        assert len({*map(tuple, texts(visits[0][i : i + PEERS]))}) == PEERS
    assert texts(visits[0]) == texts(visits[2]) != texts(visits[1])


@pytest.mark.newest
def test_no_old_response_is_used_twice(
    speculative: Callable[..., Any], prompts: Prompts, parameters: Callable[..., Any]
) -> None:
    """As verl asks: the prompts repeated, one response each. More than there were before are written anew."""
    rollout, _ = speculative(math.inf)
    rollout.generate(prompts[:3], parameters(n=2), epoch=0, use_tqdm=False)
    repeated = rollout.generate([*prompts[:3]] * 3, parameters(n=1), epoch=1, use_tqdm=False)
    for i in range(3):
        assert sorted(r.reused for r in repeated[i::3]) == [0, LENGTH, LENGTH]
        assert len({*map(tuple, texts(repeated[i::3]))}) == 3
    again = rollout.generate(prompts[:3], parameters(n=3), epoch=1, use_tqdm=False)
    assert {r.old_epoch for r in again} == {0, None}  # not the ones of the same epoch


@pytest.mark.long
def test_thousands_of_prompts(speculative: Callable[..., Any], parameters: Callable[..., Any]) -> None:
    prompts = [[i % 32, i // 32 % 32, i // 1024, 5] for i in range(2000)]
    rollout, _ = speculative(max_num_seqs=128)
    few = parameters(n=1, max_tokens=4)
    first = rollout.generate(prompts, few, epoch=0, use_tqdm=False)
    second = rollout.generate([{"prompt_token_ids": p} for p in prompts], few, epoch=1, use_tqdm=False)
    assert texts(second) == texts(first)
    assert rollout.report.whole == 2000


@pytest.mark.newest
@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"temperature": 0.7}, "temperature: 0.7"),
        ({"temperature": 0}, "temperature"),
        ({"top_p": 0.9}, "top_p: 0.9"),
        ({"top_k": 5}, "top_k: 5"),
        ({"min_p": 0.1}, "min_p"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {1: 2.0}}, "logit_bias"),
        ({"allowed_token_ids": [1, 2]}, "allowed_token_ids"),
        ({"stop": ["a"], "detokenize": True}, "stop: .*stop_token_ids"),
    ],
)
def test_sampling_that_changes_the_distribution_is_refused(
    parameters: Callable[..., Any], changes: Any, name: str
) -> None:
    assert sampling.objection(parameters(min_tokens=3, stop_token_ids=[1], seed=2)) is None
    assert re.search(f"sampling_params.{name}", str(sampling.objection(parameters(n=1, **changes))))
