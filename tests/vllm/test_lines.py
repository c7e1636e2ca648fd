"""The log lines of an engine's process, and refused settings and requests, with real vLLM and real servers."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from histospec.client import DraftClient, Response
from histospec.protocol.limits import DEFAULT_MAX_DRAFT
from tests.support.ports import free_port
from tests.support.servers import Server, Starter
from tests.support.waiting import ENGINE_SECONDS, eventually
from tests.vllm.conftest import RUNNER
from tests.vllm.told_engine import ANSWER

pytestmark = [pytest.mark.vllm, pytest.mark.newest]

FORMATTED = re.compile(r"(INFO|WARNING) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] (HistoSpec: .*)$")


class Engine:
    """told_engine.py and all that it printed. Lines of HistoSpec's are `said`, with their levels."""

    def __init__(self, model: str) -> None:
        root = Path(__file__).parents[2]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
        }
        self.lines: list[str] = []
        self._answers: Queue[Any] = Queue()
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("told_engine.py")), model],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def do(self, **command: Any) -> Any:
        """The answer to a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer = self._answers.get(timeout=ENGINE_SECONDS)
        assert answer is not None, "\n".join(self.lines[-40:])
        return answer

    def start(self, endpoint: str, namespace: str, tokens: int = 16, **environment: str) -> Any:
        """An engine with these settings, and nothing printed yet."""
        self.do(end=True)  # the engine before reports its last steps
        self.lines.clear()
        drafts = {
            "speculative_config": {
                "method": "custom_class",
                "model": "histospec.client.vllm.HistoSpecProposer",
                "num_speculative_tokens": tokens,
            },
            "scheduler_cls": "histospec.client.vllm.HistoSpecScheduler",
        }
        settings = {
            "HISTOSPEC_ENDPOINT": endpoint, "HISTOSPEC_NAMESPACE": namespace, "HISTOSPEC_DEADLINE": "5",
            "HISTOSPEC_VERIFY_COST": "0.05",
        }  # fmt: skip
        return self.do(start=drafts, environment=settings | environment)

    @property
    def said(self) -> list[str]:
        """HistoSpec's lines, as `LEVEL HistoSpec: …`; every one has vLLM's form."""
        ours = [line for line in self.lines if "histospec" in line.lower()]
        found = [FORMATTED.search(line) for line in ours if "Error" not in line and "replaces" not in line]
        return [f"{line[1]} {line[2]}" for line in found if line is not None]

    def says(self, *patterns: str) -> None:
        """Waits until there are exactly these lines, as regular expressions, in this order."""

        def there() -> bool:
            said = self.said
            return len(said) == len(patterns) and all(map(re.fullmatch, patterns, said))

        try:
            eventually(there)
        except AssertionError:
            raise AssertionError("\n".join(self.lines[-60:])) from None

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(ENGINE_SECONDS)
        finally:
            self._process.kill()
            self._reader.join(ENGINE_SECONDS)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                self._answers.put(json.loads(line.removeprefix(ANSWER)))
            elif line.strip():
                self.lines.append(line.rstrip("\n"))
        self._answers.put(None)


@pytest.fixture(scope="module")
def engine(tiny_model: str) -> Iterator[Engine]:
    engine = Engine(tiny_model)
    yield engine
    engine.close()


@pytest.fixture
def known(server: Server, namespace: str, prompts: list[list[int]]) -> Callable[[], int]:
    """known() -> how many problems the server knows; the test's prompts among them, each with a response."""
    with DraftClient(server.endpoint, namespace) as client:
        for prompt in prompts:
            client.ingest(prompt, [Response([1, 2, 3])])
    return lambda: len(prompts)


REFUSED = (
    r"\(connection refused\), going on WITHOUT drafts; is HISTOSPEC_ENDPOINT right\? Is the server running there, .*"
)


def test_a_server_is_named_with_what_it_knows(
    engine: Engine, server: Server, namespace: str, prompts: list[list[int]], known: Callable[[], int]
) -> None:
    assert engine.start(server.endpoint, namespace) == "started"
    engine.do(generate=prompts)
    engine.says(
        rf"INFO HistoSpec: connected to {server.endpoint} \(\d+\.\d+\.\d+\), {known()} problems known in namespace "
        rf"{re.escape(namespace)}; drafts of up to 16 tokens, model runner V[12]"
    )


def test_a_wrong_endpoint(engine: Engine, namespace: str, prompts: list[list[int]]) -> None:
    """Said at the start, and not again by the first steps."""
    endpoint = f"127.0.0.1:{free_port()}"
    assert engine.start(endpoint, namespace) == "started"
    engine.says(f"WARNING HistoSpec: no server at {endpoint} {REFUSED}")
    assert len(engine.do(generate=prompts)) == len(prompts)
    engine.says(f"WARNING HistoSpec: no server at {endpoint} {REFUSED}")


def test_the_http_port_as_endpoint(engine: Engine, server: Server, namespace: str) -> None:
    assert engine.start(server.http, namespace) == "started"
    engine.says(
        rf"WARNING HistoSpec: no server at {server.http} \(it speaks HTTP/1, not gRPC\), going on WITHOUT drafts; is "
        r"HISTOSPEC_ENDPOINT right\? Is this the server's HTTP port.* 6378 .*"
    )


def test_tokens(engine: Engine, start_server: Starter, tmp_path: Path) -> None:
    """None, a wrong one, one of another namespace, one that may not write; and a file that is not there."""
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(
        '[[token]]\nname = "workers"\nsecret = "0123456789abcdef"\nnamespaces = ["run-*"]\n'
        '[[token]]\nname = "readers"\nsecret = "fedcba9876543210"\nrights = ["read"]\n'
    )
    endpoint = start_server("--tokens", str(tokens)).endpoint
    start = rf"WARNING HistoSpec: {endpoint} does not let this client in \("
    engine.start(endpoint, "run-1")
    engine.says(start + r".*no bearer token.*\), going on WITHOUT drafts; is HISTOSPEC_TOKEN right\?")
    engine.start(endpoint, "run-1", HISTOSPEC_TOKEN="0123456789wrong.")
    unknown = r".*does not know the token; its sha256 begins with [0-9a-f]{8}\)"
    engine.says(start + unknown + r", going on WITHOUT drafts; is HISTOSPEC_TOKEN right\?")
    engine.start(endpoint, "test-1", HISTOSPEC_TOKEN="0123456789abcdef")
    engine.says(
        start + r"its token has no right to read in namespace 'test-1'\), .* are HISTOSPEC_TOKEN and .* right\?"
    )
    engine.start(endpoint, "run-1", HISTOSPEC_TOKEN="fedcba9876543210")
    engine.says(
        r"INFO HistoSpec: connected to .*", r"WARNING HistoSpec: the token may not write in namespace 'run-1'; .*"
    )
    answer = engine.start(endpoint, "run-1", HISTOSPEC_TOKEN_FILE="/none/token")
    assert answer == {
        "error": "ConfigurationError: HISTOSPEC_TOKEN_FILE: cannot read /none/token: No such file or directory"
    }


def test_a_server_that_stops_and_comes_back(
    engine: Engine, server: Server, namespace: str, prompts: list[list[int]]
) -> None:
    assert engine.start(server.endpoint, namespace) == "started"
    engine.do(generate=prompts[:2])
    server.kill()
    engine.do(generate=prompts[:2])
    connected = r"INFO HistoSpec: connected to .*"
    gone = f"WARNING HistoSpec: no server at {server.endpoint} {REFUSED}"
    engine.says(connected, gone)
    server.restart()
    eventually(lambda: engine.do(generate=prompts[:2]) and len(engine.said) > 2)
    engine.says(connected, gone, rf"INFO HistoSpec: drafting again after \d+ s, from {server.endpoint}")


def test_a_namespace_of_nearly_the_same_name(engine: Engine, server: Server) -> None:
    with DraftClient(server.endpoint, "train") as client:
        client.ingest([1, 2], [Response([3])])
    engine.start(server.endpoint, "trian")
    engine.says(
        r"INFO HistoSpec: connected to .*, 0 problems known in namespace trian; .*",
        r"WARNING HistoSpec: nothing is known in namespace 'trian'; did you mean 'train'\?",
    )
    engine.start(server.endpoint, "train")
    engine.says(r"INFO HistoSpec: connected to .*, 1 problem known in namespace train; .*")


def test_drafts_that_are_too_long_are_refused(engine: Engine, start_server: Starter, namespace: str) -> None:
    """By V1's verification, which ends the engine otherwise, and by the server's limit."""
    limit, whose = {"v1": (128, "vLLM"), "v2": (DEFAULT_MAX_DRAFT, "HistoSpec")}[RUNNER]
    for tokens in (limit + 1, 2000):
        answer = engine.start(f"127.0.0.1:{free_port()}", namespace, tokens=tokens)
        sentence = f"HistoSpec: num_speculative_tokens is {tokens}; must be at most {limit}: the limit of {whose}"
        assert sentence in answer["error"]
        assert answer["error"].startswith("ValueError: ")
    endpoint = start_server("--max-draft-tokens", "8").endpoint
    answer = engine.start(endpoint, namespace)
    sentence = f"must be at most 8, the --max-draft-tokens of {endpoint}"
    assert answer == {"error": f"ValueError: HistoSpec: num_speculative_tokens is 16; {sentence}"}


def test_a_server_that_comes_later_and_drafts_less(
    engine: Engine, start_server: Starter, namespace: str, prompts: list[list[int]]
) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    engine.start(endpoint, namespace)
    server = start_server("--listen", endpoint, "--max-draft-tokens", "8")
    eventually(lambda: engine.do(generate=prompts[:2]) and len(engine.said) > 2)
    engine.do(generate=prompts[:2])
    gone, *later = engine.said
    assert gone.startswith(f"WARNING HistoSpec: no server at {endpoint} (")
    assert re.fullmatch(rf"INFO HistoSpec: drafting again after \d+ s, from {endpoint}", later[0])
    cut = f"{endpoint} drafts at most 8 tokens (--max-draft-tokens), and 16 are asked for; drafts are cut"
    assert later[1:] == [f"WARNING HistoSpec: {cut}"]
    drafted = f'histospec_drafts_total{{namespace="{namespace}",result="hit"}}'
    eventually(lambda: server.metrics().get(drafted, 0) > 0)


@pytest.fixture
def short_minutes(engine: Engine) -> Iterator[None]:
    engine.do(seconds=0.5)
    yield
    engine.do(seconds=60)


@pytest.mark.usefixtures("short_minutes")
def test_each_minute_of_an_outage(engine: Engine, namespace: str, prompts: list[list[int]]) -> None:
    """While steps go on; an engine that idles says nothing."""
    endpoint = f"127.0.0.1:{free_port()}"
    engine.start(endpoint, namespace)
    gone = f"WARNING HistoSpec: no server at {endpoint} {REFUSED}"
    eventually(lambda: engine.do(generate=prompts[:2]) and sum("no server" in line for line in engine.said) > 2)
    assert all(re.fullmatch(gone, line) or "of generating" in line for line in engine.said)


@pytest.mark.usefixtures("short_minutes")
def test_a_line_a_minute_while_it_generates(
    engine: Engine, server: Server, namespace: str, prompts: list[list[int]]
) -> None:
    engine.start(server.endpoint, namespace)
    minute = re.compile(
        r"INFO HistoSpec: in \d+ s of generating (\S+) tokens per step of a request, (\d+)% of \d+ drafted tokens "
        r"accepted, drafts for (\d+)% of the requests that asked, verify cost 0.050 \(assumed\), waited for drafts "
        r"\S+ ms per step \(p99 \S+ ms\), estimated speed-up (\S+)"
    )

    def drafted() -> bool:
        engine.do(generate=prompts)
        found = [minute.fullmatch(line) for line in engine.said]
        return any(m is not None and float(m[1]) > 2 and int(m[2]) > 0 and float(m[4]) > 1 for m in found)

    eventually(drafted)
    # The engine of the test before may still miss its server.
    (connected,) = (line for line in engine.said if not re.search("of generating|no server at", line))
    assert "connected to" in connected


def test_a_trial_of_less_than_a_minute_shows_its_gain(
    engine: Engine, server: Server, namespace: str, prompts: list[list[int]]
) -> None:
    engine.start(server.endpoint, namespace)
    engine.do(generate=prompts[:2])
    engine.do(end=True)
    assert re.match(r"INFO HistoSpec: in \d+ s of generating \S+ tokens per step of a request, ", engine.said[-1])


@pytest.mark.usefixtures("short_minutes")
def test_the_line_counts_requests_without_a_session(
    engine: Engine, server: Server, namespace: str, prompts: list[list[int]]
) -> None:
    engine.start(server.endpoint, namespace)

    def said() -> bool:
        engine.do(generate=prompts[:3], max_tokens=1, prompt_logprobs=0)
        engine.do(generate=prompts[:2], max_tokens=1)
        counted = re.compile(r"without a session: \d+ score their prompt, \d+ ask for one token$")
        return any(map(counted.search, engine.said))

    eventually(said)


@pytest.mark.parametrize("option", [{"min_p": 0.1, "temperature": 1}, {"logit_bias": {"1": 2.0}}])
def test_what_vllm_refuses_with_speculation(
    engine: Engine, server: Server, namespace: str, prompts: list[list[int]], option: dict[str, Any]
) -> None:
    engine.start(server.endpoint, namespace)
    answer = engine.do(generate=prompts[:1], **option)
    assert "The min_p and logit_bias sampling parameters are not yet supported with speculative" in answer["error"]
    assert len(engine.do(generate=prompts[:1])) == 1  # the engine goes on
