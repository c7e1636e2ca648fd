"""Hits and misses on /metrics are the requests, to the unit."""

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.newest]


def test_one_lookup_a_request(engine, server, prompts):
    def lookups():
        name = "histospec_problem_lookups_total"
        return [server.metrics().get(f'{name}{{namespace="test",result="{result}"}}', 0) for result in ("miss", "hit")]

    rollouts = engine(server.endpoint, max_num_seqs=4)  # most wait while the first ones finish
    rollouts.generate(prompts, n=3, temperature=1, max_tokens=12)
    assert lookups() == [3 * len(prompts), 0]
    rollouts.generate(prompts[:5], n=3, temperature=1, max_tokens=12)
    assert lookups() == [3 * len(prompts), 15]
    rollouts.generate([*prompts[:2], [31, 31, 30]], max_tokens=12)
    assert lookups() == [3 * len(prompts) + 1, 17]
