"""The history has the responses of the engine, token for token, for every way in which a response ends."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.clients import texts
from tests.support.engines import MakeClient, Prompts, StartEngine, let_workers_know
from tests.support.servers import Server
from tests.vllm.conftest import ASYNCHRONOUS

pytestmark = [pytest.mark.vllm, pytest.mark.newest]


@pytest.fixture
def check(shared_server: Server, make_client: MakeClient) -> Callable[..., Any]:
    """Compares the history of every prompt with the responses that the engine returned for it."""

    def compare(prompts: Prompts, responses: Any, problems: Any = None) -> Any:
        client = make_client(shared_server.endpoint)
        for i, (prompt, group) in enumerate(zip(prompts, responses, strict=True)):
            history = client.history(prompt, problem=problems[i] if problems else None)
            assert sorted(texts(history)) == sorted(group)
        return client

    return compare


@pytest.fixture
def lookups(shared_server: Server, namespace: str) -> Callable[..., Any]:
    """lookups() -> how many problems of this test the server looked up."""
    name = f'histospec_problem_lookups_total{{namespace="{namespace}",'
    return lambda: sum(v for sample, v in shared_server.metrics().items() if sample.startswith(name))


@pytest.fixture(params=["installed", "AsIn033", "WithTheFunctionOf033"])
def cutting(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The scheduler of the installed vLLM, and what vLLM 0.33 does otherwise where it cuts the tokens of a request."""
    pytest.importorskip("vllm", reason="needs a vLLM build in the environment")
    from tests.support import scheduler_of_033

    if request.param == "installed":
        return {}
    if ASYNCHRONOUS:
        pytest.skip("a subclass of the synchronous scheduler; vLLM 0.33 itself runs in an environment of its own")
    if request.param == "WithTheFunctionOf033" and not scheduler_of_033.SOURCES.exists():
        pytest.skip(f"needs {scheduler_of_033.SOURCES.name}, which `make vllm-versions` keeps")
    return {"scheduler_cls": f"{scheduler_of_033.__name__}.{request.param}"}


def twice(rollouts: Any, prompts: Prompts, **sampling: Any) -> Any:
    """Two visits, so that the second has drafts to cut; all responses of both by prompt."""
    visits = [rollouts.generate(prompts, **sampling) for _ in range(2)]
    assert rollouts.counter("spec_decode_num_draft_tokens") > 0
    return [first + second for first, second in zip(*visits, strict=True)]


def test_max_tokens(engine: StartEngine, shared_server: Server, prompts: Prompts, check: Callable[..., Any]) -> None:
    responses = twice(engine(shared_server.endpoint), prompts, max_tokens=19)
    assert all(len(r) == 19 for group in responses for r in group)
    check(prompts, responses)


def test_one_token(engine: StartEngine, shared_server: Server, prompts: Prompts, check: Callable[..., Any]) -> None:
    """An option says that it is a rollout; test_no_rollouts.py has requests for one token without."""
    rollouts = engine(shared_server.endpoint)
    check(prompts, rollouts.generate(prompts, max_tokens=1, extra_args={"histospec": {"epoch": 0}}))


def test_stop_tokens(
    engine: StartEngine, shared_server: Server, prompts: Prompts, check: Callable[..., Any], cutting: dict[str, Any]
) -> None:
    """Stop tokens in the middle of an accepted draft, too: the second visit drafts past where it must end."""
    rollouts = engine(shared_server.endpoint, **cutting)
    long = rollouts.generate(prompts, max_tokens=40)
    stops = sorted({group[0][20] for group in long})[:3]
    short = rollouts.generate(prompts, max_tokens=40, stop_token_ids=stops)
    assert any(len(group[0]) < 40 for group in short)
    assert rollouts.counter("spec_decode_num_accepted_tokens") > 0
    assert getattr(rollouts.scheduler, "cut", 1) > 0
    check(prompts, [a + b for a, b in zip(long, short, strict=True)])
    assert rollouts.generate(prompts, max_tokens=40) == long  # the cached blocks of what was cut change nothing


def test_stop_strings(
    engine: StartEngine, shared_server: Server, prompts: Prompts, check: Callable[..., Any], cutting: dict[str, Any]
) -> None:
    """vLLM finds them in its front end, after the engine core has gone on; the history ends where the text does."""
    rollouts = engine(shared_server.endpoint, skip_tokenizer_init=False, **cutting)
    long = rollouts.generate(prompts, max_tokens=40, detokenize=True)
    stops = [text(group[0][18:20]) for group in long[:4]]
    short = rollouts.generate(prompts, max_tokens=40, detokenize=True, stop=stops)
    long, short = [group[0] for group in long], [group[0] for group in short]
    ends = [min((i for i in range(2, 41) if text(response[i - 2 : i]) in stops), default=40) for response in long]
    assert any(end < 40 for end in ends)
    cut = [response[:end] for response, end in zip(long, ends, strict=True)]
    # What vLLM returned before 0.32 ran past the stop string when a draft did.
    assert [response[: len(c)] for response, c in zip(short, cut, strict=True)] == cut
    check(prompts, [list(pair) for pair in zip(long, cut, strict=True)])


def text(tokens: Any) -> Any:
    return "".join("abcdefghijklmnopqrstuvwxyz012345"[token] for token in tokens)


def test_siblings(engine: StartEngine, shared_server: Server, prompts: Prompts, check: Callable[..., Any]) -> None:
    rollouts = engine(shared_server.endpoint)
    responses = twice(rollouts, prompts[:4], n=4, temperature=1, max_tokens=24)
    assert all(len(group) == 8 for group in responses)
    check(prompts[:4], responses)


def test_chunked_prefill(engine: StartEngine, shared_server: Server, check: Callable[..., Any]) -> None:
    prompts = [[(3 * i + j) % 32 for j in range(100 + i)] for i in range(6)]
    rollouts = engine(shared_server.endpoint, max_num_batched_tokens=32, max_num_seqs=8)
    check(prompts, twice(rollouts, prompts, max_tokens=24))


def test_preemption(
    engine: StartEngine, shared_server: Server, prompts: Prompts, check: Callable[..., Any], lookups: Callable[..., Any]
) -> None:
    """A cache too small for all: requests are thrown out half-way, and computed again."""
    rollouts = engine(shared_server.endpoint, num_gpu_blocks_override=20, block_size=32, enable_prefix_caching=False)
    preempted = []
    preempt = rollouts.scheduler._preempt_request

    def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    rollouts.scheduler._preempt_request = counted
    responses = twice(rollouts, prompts, max_tokens=120)
    assert preempted
    check(prompts, responses)
    # Asynchronous steps: the workers' session, a new one when a request resumes, and one for the commit.
    assert (lookups() > 4 * len(prompts)) if ASYNCHRONOUS else (lookups() == 2 * len(prompts))


def test_reset_of_running_requests(
    engine: StartEngine, shared_server: Server, prompts: Prompts, check: Callable[..., Any]
) -> None:
    """As after new weights in the middle of a rollout: every running request is preempted at once."""
    rollouts = engine(shared_server.endpoint)
    rollouts.generate(prompts)
    first = rollouts.generate(prompts)
    rollouts.start(prompts)
    rollouts.step(2)
    assert rollouts.scheduler.running
    rollouts.scheduler.reset_prefix_cache(reset_running_requests=True)
    second = rollouts.finish()
    assert second == first
    check(prompts, [a * 3 for a in first])


def test_end_of_the_model(
    engine: StartEngine, shared_server: Server, check: Callable[..., Any], cutting: dict[str, Any]
) -> None:
    prompts = [[1, 2, 3] * 30, [4, 5, 6] * 30]
    responses = twice(engine(shared_server.endpoint, max_model_len=128, **cutting), prompts, max_tokens=None)
    assert all(len(r) == 38 for group in responses for r in group)
    check(prompts, responses)


def test_aborted_requests_are_not_committed(
    engine: StartEngine, shared_server: Server, prompts: Prompts, check: Callable[..., Any]
) -> None:
    rollouts = engine(shared_server.endpoint)
    rollouts.start(prompts)
    rollouts.step(5)
    aborted = rollouts.ids[: len(prompts) // 2]
    rollouts.llm.llm_engine.abort_request(aborted)
    responses = [group or [] for group in rollouts.finish()]
    assert [not group for group in responses] == [True] * len(aborted) + [False] * (len(prompts) - len(aborted))
    check(prompts, responses)
    let_workers_know(rollouts.llm)
    assert shared_server.metrics()["histospec_sessions"] == 0
    assert rollouts.scheduler._limits == {}


def test_problems_epochs_and_seeds(
    engine: StartEngine, shared_server: Server, prompts: Prompts, check: Callable[..., Any]
) -> None:
    """Requests of one problem with different prompts share a history; epochs and seeds are kept with the responses."""
    rollouts = engine(shared_server.endpoint)
    seeds = [0, -(2**63), 2**63 - 1, 2**60 + 1, 7, 7, *[None] * len(prompts)][: len(prompts)]
    extra = [{"histospec": {"problem": f"p{i % 3}", "epoch": i // 6, "seed": seed}} for i, seed in enumerate(seeds)]
    responses = rollouts.generate(prompts, extra_args=extra)
    problems = [f"p{i}" for i in range(3)]
    groups = [[r for group in responses[i::3] for r in group] for i in range(3)]
    client = check(prompts[:3], groups, problems)
    for i, (problem, prompt, group) in enumerate(zip(problems, prompts, groups, strict=False)):
        stored = {tuple(r.tokens): (r.epoch, r.seed) for r in client.history(prompt, problem=problem)}
        assert [stored[tuple(r)] for r in group] == list(zip([0, 0, 1, 1], seeds[i::3], strict=True))


def test_requests_left_alone(
    engine: StartEngine, shared_server: Server, prompts: Prompts, check: Callable[..., Any], lookups: Callable[..., Any]
) -> None:
    rollouts = engine(shared_server.endpoint)
    rollouts.generate(prompts, extra_args={"histospec": False})
    check(prompts, [[] for _ in prompts])
    assert lookups() == 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"histospec": 7},
        {"histospec": "{"},
        {"histospec": {"epoch": "soon", "problem": "x" * 1025, "seed": 2.5}},
        {"histospec": [1]},
    ],
)
def test_useless_options_are_ignored(
    engine: StartEngine, shared_server: Server, prompts: Prompts, check: Callable[..., Any], arguments: Any
) -> None:
    rollouts = engine(shared_server.endpoint)
    check(prompts, rollouts.generate(prompts, extra_args=arguments))
