"""The hits and misses of /metrics add up to the requests exactly."""

from typing import Any

import pytest

from tests.support.engines import Prompts, StartEngine
from tests.support.servers import Server

pytestmark = [pytest.mark.vllm, pytest.mark.newest]


def test_one_lookup_a_request(engine: StartEngine, shared_server: Server, namespace: str, prompts: Prompts) -> None:
    def lookups() -> Any:
        metrics = shared_server.metrics()
        name = f'histospec_problem_lookups_total{{namespace="{namespace}",result="%s"}}'
        return [metrics.get(name % result, 0) for result in ("miss", "hit")]

    rollouts = engine(shared_server.endpoint, max_num_seqs=4)  # most wait while the first ones finish
    rollouts.generate(prompts, n=3, temperature=1, max_tokens=12)
    assert lookups() == [3 * len(prompts), 0]
    rollouts.generate(prompts[:5], n=3, temperature=1, max_tokens=12)
    assert lookups() == [3 * len(prompts), 15]
    rollouts.generate([*prompts[:2], [31, 31, 30]], max_tokens=12)
    assert lookups() == [3 * len(prompts) + 1, 17]
