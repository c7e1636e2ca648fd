"""Faults of real servers, which are killed, stopped, cut off or misbehave.

No test asserts a time. To show that a worker does not wait, tests count steps: while a server is away, steps return
with empty drafts, and most of them are not sent.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
import pytest

from histospec.client import (
    AsyncDraftClient,
    Breaker,
    DeadlineExceeded,
    Draft,
    DraftClient,
    Response,
    Timeouts,
    Unavailable,
)
from histospec.client.core import commits
from histospec.client.core.recovery import RATE
from histospec.protocol.placement import place, problem_digest
from histospec.v1 import draft_pb2 as pb
from tests.support.clients import flushed, texts
from tests.support.odd_server import Answer, OddServer
from tests.support.ports import free_port
from tests.support.rollouts import shut_down
from tests.support.servers import Server, Starter
from tests.support.waiting import SLOWNESS, Latch, eventually

PROMPT = [11, 12, 13, 14]
TEXT = list(range(100, 400))
QUICK = Breaker(cooldown=0.05, cooldown_max=0.2)
PATIENT = 2.0


def one_step(client: DraftClient, sessions: list[int], tokens: Sequence[int] = ()) -> list[Draft]:
    return client.step(sessions, [list(tokens) for _ in sessions])


def until_drafts(client: DraftClient, sessions: list[int]) -> None:
    """Steps until every session has drafts again, like a worker that does not know of the fault."""
    eventually(lambda: all(len(d) for d in one_step(client, sessions)))


# ---- away ---------------------------------------------------------------------------------------------------------


def test_server_absent_from_the_start(start_server: Starter) -> None:
    port = free_port()
    with DraftClient(f"127.0.0.1:{port}", "run", breaker=QUICK, deadline=PATIENT) as client:
        sessions = client.open([PROMPT, PROMPT])
        for i in range(50):
            assert [len(d) for d in client.step(sessions, [[TEXT[i]], [TEXT[i]]])] == [0, 0]
        stats = client.stats()
        assert stats.skipped > 25
        assert stats.breakers == {f"127.0.0.1:{port}": "open"}
        with pytest.raises(Unavailable, match=rf"Ingest on 127.0.0.1:{port}: "):
            client.ingest(PROMPT, [Response(TEXT)])
        with pytest.raises(ConnectionError):
            client.history(PROMPT)

        server = start_server("--listen", f"127.0.0.1:{port}")
        client.ingest(PROMPT, [Response(TEXT)])
        until_drafts(client, sessions)
        assert one_step(client, sessions)[0].tokens[0] == TEXT[50]  # the server has the tokens generated meanwhile
        assert client.stats().breakers[server.endpoint] == "closed"
        client.close(sessions)
        assert texts(client.history(PROMPT)) == [TEXT, TEXT[:50], TEXT[:50]]


def test_killed_in_the_middle_and_restarted(server: Server) -> None:
    with DraftClient(server.endpoint, "run", breaker=QUICK, deadline=PATIENT) as client:
        client.ingest(PROMPT, [Response(TEXT)])
        sessions = client.open([PROMPT, PROMPT])
        for i in range(20):
            assert all(len(d) for d in client.step(sessions, [[TEXT[i]], [TEXT[i]]]))
        server.kill()
        for i in range(20, 40):
            assert not any(len(d) for d in client.step(sessions, [[TEXT[i]], [TEXT[i]]]))
        server.restart()
        until_drafts(client, sessions)
        assert [d.tokens[0] for d in one_step(client, sessions)] == [TEXT[40]] * 2
        assert client.stats().reopened >= 2
        client.close(sessions)
        client.flush(PATIENT)
        assert texts(client.history(PROMPT)) == [TEXT, TEXT[:40], TEXT[:40]]


def test_commits_survive_while_the_server_is_away(server: Server) -> None:
    """Sessions closed while the server is down, one of them unknown to it: all responses arrive, each once."""
    with DraftClient(server.endpoint, "run", breaker=QUICK, deadline=PATIENT) as client:
        known = client.open([PROMPT])
        client.step(known, [[1, 2]])
        server.kill()
        client.step(known, [[3]])
        strange = client.open([PROMPT])
        client.step(strange, [[7, 8]])
        client.close(known, epochs=5, rewards=0.5, logprobs=[[-1.0, -2.0, -3.0]])
        client.close(strange, epochs=6)
        client.flush()
        assert client.stats().pending_commits == 2
        server.restart()
        eventually(lambda: flushed(client).pending_commits == 0)
        first, second = sorted(client.history(PROMPT), key=lambda r: r.epoch or 0)
        assert (list(first.tokens), first.epoch, first.reward) == ([1, 2, 3], 5, 0.5)
        assert np.asarray(first.logprobs).tolist() == [-1.0, -2.0, -3.0]
        assert (list(second.tokens), second.epoch) == ([7, 8], 6)


def test_what_a_store_cannot_take_now_is_sent_again(odd_server: OddServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused three times and then accepted: the client keeps the response, pauses between tries, and drops nothing."""
    monkeypatch.setattr(commits, "FIRST_PAUSE", 0.05)
    closed = []

    def answer(request: pb.DraftRequest, context: grpc.ServicerContext) -> pb.DraftResponse | None:
        response = odd_server.draft(request)
        assert response is not None
        for close in request.closes:
            closed.append(close.session)
            if len(closed) <= 3:
                response.refusals.add(session=close.session, reason="store: away", later=True)
        return response

    odd_server.answer = answer
    with DraftClient(odd_server.endpoint, "run", breaker=QUICK, deadline=PATIENT) as client:
        (session,) = client.open([PROMPT])
        client.step([session], [[1, 2]])
        client.close([session])
        client.flush(PATIENT)
        assert (client.stats().pending_commits, client.stats().dropped_commits, closed) == (1, 0, [session])
        client.flush(PATIENT)  # not yet: it returns at once
        assert closed == [session]
        eventually(lambda: flushed(client, PATIENT).commits == 1)
        assert closed == [session] * 4
        assert (client.stats().pending_commits, client.stats().dropped_commits, client.stats().refused) == (0, 0, 0)
    assert odd_server.opened().count((session, [1, 2])) == 3  # with its text each time


def test_restart_under_load_with_a_backlog(server: Server) -> None:
    """SIGKILL and a new start, while 256 sessions of 16 KB step on and 2,000 responses wait.

    The first connection to the new server stays, the breaker never opens again, and no response is lost. In which
    slices sessions and responses follow is tested in test_recovery.py.
    """
    long, deadline = PROMPT * 1000, 0.25 * SLOWNESS
    with DraftClient(server.endpoint, "run", deadline=deadline, timeouts=Timeouts(silence=30)) as client:
        client.ingest(long, [Response(TEXT)])
        sessions = client.open([long] * 256)
        client.step(sessions, [TEXT[:5]] * 256)
        until_drafts(client, sessions)
        server.kill()
        eventually(lambda: one_step(client, sessions) and client.stats().breakers[server.endpoint] == "open")
        client.close(client.open([[9]] * 2000, generated=[TEXT * 4] * 2000), epochs=1)
        one_step(client, sessions)
        starting = threading.Thread(target=server.restart)
        starting.start()
        while starting.is_alive():
            one_step(client, sessions)
            time.sleep(0.01)  # the forward pass
        failed = client.stats().failed
        eventually(lambda: any(len(d) for d in one_step(client, sessions)))
        skipped = client.stats().skipped
        until_drafts(client, sessions)
        eventually(lambda: one_step(client, sessions) and not client.stats().pending_commits)
        stats = client.stats()
        assert stats.failed - failed <= 1  # a try was perhaps on its way when the server became ready
        assert (stats.skipped, stats.dropped_commits, stats.commits) == (skipped, 0, 2000)
        assert len(client.history([9])) == 2000


# ---- slow ---------------------------------------------------------------------------------------------------------


def test_slow_server_is_back_without_a_second_connection(odd_server: OddServer) -> None:
    """It takes half a second for what its sessions hold, with the deadline of 20 ms: each is opened once, in slices."""

    def slowly(request: pb.DraftRequest, context: grpc.ServicerContext) -> pb.DraftResponse | None:
        time.sleep(request.ByteSize() / (4 << 20))
        return odd_server.draft(request)

    timeouts = Timeouts(silence=30)
    with DraftClient(odd_server.endpoint, "run", timeouts=timeouts) as client:
        sessions = client.open([PROMPT * 1000] * 128)
        until_drafts(client, sessions)
        odd_server.stop()
        eventually(lambda: one_step(client, sessions) and client.stats().breakers[odd_server.endpoint] == "open")
        odd_server.requests.clear()
        odd_server.streams, odd_server.answer = 0, slowly
        odd_server.start()
        until_drafts(client, sessions)
        assert odd_server.streams == 1
    slices = [r.ByteSize() for r in odd_server.requests if r.opens]
    assert len(slices) > 4
    assert slices[0] < RATE * timeouts.step + 20_000
    assert sorted(session for session, _ in odd_server.opened()) == sessions


def test_stopped_server_costs_few_deadlines_and_comes_back(server: Server) -> None:
    """SIGSTOP: connections stay, nothing answers. The deadline, then the breaker; SIGCONT, and drafts are back."""
    timeouts = Timeouts(call=0.2, silence=0.3)
    with DraftClient(server.endpoint, "run", breaker=QUICK, timeouts=timeouts) as client:
        client.ingest(PROMPT, [Response(TEXT)])
        sessions = client.open([PROMPT])
        client.step(sessions, [TEXT[:5]])
        until_drafts(client, sessions)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            before = client.stats()
            for i in range(5, 205):
                assert len(client.step(sessions, [[TEXT[i]]])[0]) == 0
                time.sleep(0.005)  # the forward pass
            after = client.stats()
            assert after.late > before.late
            assert after.skipped - before.skipped > 100
            with pytest.raises(DeadlineExceeded):
                client.predict_length(PROMPT)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        until_drafts(client, sessions)
        assert one_step(client, sessions)[0].tokens[0] == TEXT[205]


def test_server_hears_which_drafts_were_late(server: Server) -> None:
    with DraftClient(server.endpoint, "run", breaker=QUICK) as client:
        client.ingest(PROMPT, [Response(TEXT)])
        sessions = client.open([PROMPT])
        until_drafts(client, sessions)
        before = client.stats().late
        os.kill(server.pid, signal.SIGSTOP)
        try:
            one_step(client, sessions)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert client.stats().late == before + 1
        eventually(
            lambda: one_step(client, sessions) and server.metrics()["histospec_late_steps_total"] == client.stats().late
        )


def test_late_answers_are_not_mistaken_for_later_ones(odd_server: OddServer) -> None:
    """The answer to step n, arriving during step n + 1, must not become the draft of step n + 1."""
    release = threading.Event()

    def answer(request: pb.DraftRequest, context: grpc.ServicerContext) -> pb.DraftResponse | None:
        if request.sequence == 2:
            release.wait(30)
        response = odd_server.draft(request)
        assert response is not None
        response.tokens = np.array([request.sequence], "<i4").tobytes()
        return response

    odd_server.answer = answer
    with DraftClient(odd_server.endpoint, "run", deadline=PATIENT) as client:
        sessions = client.open([PROMPT])
        assert one_step(client, sessions)[0].tokens.tolist() == [1]
        late = client.send(sessions, [[]])
        late.deadline = time.monotonic() + 0.02
        assert len(client.receive(late)[0]) == 0
        pending = client.send(sessions, [[1]])
        release.set()
        assert client.receive(pending)[0].tokens.tolist() == [3]
        assert late.drafts()[0].tokens.tolist() == [2]
        stats = client.stats()
        assert (stats.late, stats.failed, stats.reopened) == (1, 0, 0)


def test_ingest_that_hangs_holds_up_no_step(odd_server: OddServer) -> None:
    """A unary call without an answer, on a server whose stream works."""
    listener = socket.create_server(("127.0.0.1", 0))  # accepts, and never sends anything
    endpoints = f"{odd_server.endpoint},127.0.0.1:{listener.getsockname()[1]}"
    names = endpoints.split(",")
    prompts = [next([p] for p in range(99) if place(problem_digest("run", _i32([p])), names) == i) for i in (0, 1)]
    with DraftClient(endpoints, "run", deadline=PATIENT, timeouts=Timeouts(ingest=2)) as client:
        sessions = client.open([prompts[0]])
        outcome = []

        def ingest() -> None:
            try:
                client.ingest(prompts[1], [Response(TEXT)])
            except Unavailable as error:
                outcome.append(error)

        thread = threading.Thread(target=ingest)
        thread.start()
        steps = 0
        while thread.is_alive():
            assert len(one_step(client, sessions)[0]) == 1
            steps += 1
        assert steps > 10
        assert outcome
    listener.close()


# ---- wrong --------------------------------------------------------------------------------------------------------


def garbled(**fields: Any) -> Answer:
    def answer(request: pb.DraftRequest, context: grpc.ServicerContext) -> pb.DraftResponse | None:
        response = pb.DraftResponse(
            sequence=request.sequence, lengths=_i32([1]), tokens=_i32([5]), probs=np.ones(1, "<f4").tobytes()
        )
        for name, value in fields.items():
            setattr(response, name, value)
        return response

    return answer


@pytest.mark.parametrize(
    "answer",
    [
        lambda request, context: b"\xff\xff\xff\xff",
        lambda request, context: context.abort(grpc.StatusCode.INTERNAL, "broken"),
        lambda request, context: context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no"),
        lambda request, context: context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full"),
        garbled(sequence=99),
        garbled(lengths=b"\1\0\0"),
        garbled(lengths=np.array([1, 0], "<i4").tobytes()),
        garbled(lengths=np.array([2], "<i4").tobytes()),
        garbled(lengths=np.array([-1], "<i4").tobytes(), tokens=b"", probs=b""),
        garbled(tokens=np.array([-7], "<i4").tobytes()),
        garbled(probs=b""),
        garbled(unknown=b"\0\0"),
    ],
    ids=[
        "bytes",
        "internal",
        "invalid",
        "exhausted",
        "sequence",
        "lengths",
        "count",
        "sum",
        "minus",
        "token",
        "probs",
        "ids",
    ],
)
def test_garbage_is_an_empty_draft_and_a_new_stream(odd_server: OddServer, answer: Answer) -> None:
    odd_server.answer = answer
    with DraftClient(odd_server.endpoint, "run", breaker=QUICK, deadline=PATIENT) as client:
        sessions = client.open([PROMPT])
        assert len(one_step(client, sessions, [1])[0]) == 0
        assert client.stats().failed == 1
        odd_server.answer = odd_server.draft
        until_drafts(client, sessions)
        assert odd_server.opened()[-1] == (sessions[0], [1])


def test_answers_before_the_end_of_a_stream_are_read_although_a_write_fails(
    odd_server: OddServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    1. The server keeps all commits, answers them late, and ends the stream. The client does not read meanwhile.
    2. The client's next message can't be written any more.
    3. It reads the answers, so it sends no commit again, and its end waits for nothing.
    """
    answers, ended = Latch(), Latch()

    def late(request: pb.DraftRequest, context: grpc.ServicerContext) -> pb.DraftResponse | None:
        if request.closes:
            answers.wait()
        elif answers.is_set() and not ended.is_set():
            ended.set()
            context.abort(grpc.StatusCode.UNAVAILABLE, "the server drains")
        return odd_server.draft(request)

    monkeypatch.setenv("HISTOSPEC_REHEARSE", "0")  # a rehearsal reads
    client = DraftClient(odd_server.endpoint, "run", breaker=QUICK, timeouts=Timeouts(silence=60, shutdown=60))
    sessions = client.open([PROMPT] * 21)
    one_step(client, sessions, [7])
    odd_server.answer = late
    for session in sessions[1:]:
        client.close([session])
        client.flush(0.05)
    one_step(client, sessions[:1])
    answers.set()
    ended.wait()
    time.sleep(0.5)  # for gRPC's threads to receive the answers
    until_drafts(client, sessions[:1])
    client.flush(60)
    assert client.stats().pending_commits == 0
    committed = [close.session for request in odd_server.requests for close in request.closes]
    assert sorted(committed) == sorted(sessions[1:])
    shut_down(client)


def test_stream_reset_reopens_from_the_workers_context(odd_server: OddServer) -> None:
    def reset(request: pb.DraftRequest, context: grpc.ServicerContext) -> pb.DraftResponse | None:
        if odd_server.streams == 1 and request.sequence == 3:
            context.cancel()  # type: ignore[no-untyped-call]
            return None
        return odd_server.draft(request)

    odd_server.answer = reset
    with DraftClient(odd_server.endpoint, "run", breaker=QUICK, deadline=PATIENT) as client:
        sessions = client.open([PROMPT, PROMPT], seeds=[-5, None])
        for i in range(3):
            one_step(client, sessions, [i])
        until_drafts(client, sessions)
        assert odd_server.streams == 2
        assert odd_server.opened() == [(1, []), (2, []), (1, [0, 1, 2]), (2, [0, 1, 2])]
        seeds = [o.seed if o.HasField("seed") else None for r in odd_server.requests for o in r.opens]
        assert seeds == [-5, None, -5, None]


def test_commit_of_an_unknown_session_is_sent_again(odd_server: OddServer) -> None:
    def forget(request: pb.DraftRequest, context: grpc.ServicerContext) -> pb.DraftResponse | None:
        response = odd_server.draft(request)
        assert response is not None
        if request.closes and odd_server.streams == 1 and request.sequence == 2:
            response.unknown = np.array([1], "<u8").tobytes()
        return response

    odd_server.answer = forget
    with DraftClient(odd_server.endpoint, "run", deadline=PATIENT) as client:
        sessions = client.open([PROMPT])
        one_step(client, sessions, [5, 6])
        client.close(sessions, epochs=3)
        client.flush(PATIENT)
        assert client.stats().commits == 1
        last = odd_server.requests[-1]
        assert (last.closes[0].epoch, last.closes[0].generated) == (3, 2)
        assert odd_server.opened()[-1] == (1, [5, 6])


def test_commit_that_is_always_turned_down_is_dropped(odd_server: OddServer) -> None:
    def refuse(request: pb.DraftRequest, context: grpc.ServicerContext) -> pb.DraftResponse | None:
        if request.closes:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "closes: no")
        return odd_server.draft(request)

    odd_server.answer = refuse
    with DraftClient(odd_server.endpoint, "run", breaker=QUICK, deadline=PATIENT) as client:
        bad, good = client.open([PROMPT, PROMPT])
        one_step(client, [bad, good], [5])
        client.close([bad])
        eventually(lambda: one_step(client, [good]) and client.stats().dropped_commits == 1)
        until_drafts(client, [good])
        assert client.stats().pending_commits == 0


def test_refused_session_never_drafts_and_harms_no_other(start_server: Starter) -> None:
    server = start_server("--max-prompt-tokens", "10")
    with DraftClient(server.endpoint, "run", deadline=PATIENT) as client:
        client.ingest(PROMPT, [Response(TEXT)])
        long, short = client.open([range(11), PROMPT])
        for i in range(3):
            drafts = client.step([long, short], [[TEXT[i]], [TEXT[i]]])
            assert len(drafts[0]) == 0
            assert drafts[1].tokens[0] == TEXT[i + 1]
        client.close([long, short])
        assert len(client.history(PROMPT)) == 2
        stats = client.stats()
        assert (stats.refused, stats.failed, stats.commits) == (1, 0, 1)


# ---- several shards -----------------------------------------------------------------------------------------------


def test_one_shard_down_leaves_the_other_drafting(start_server: Starter) -> None:
    a, b = start_server(name="a"), start_server(name="b")
    with DraftClient(f"a={a.endpoint},b={b.endpoint}", "run", breaker=QUICK, deadline=PATIENT) as client:
        prompts = [[p, p] for p in range(20)]
        texts = [list(range(1000 * p, 1000 * p + 500)) for p in range(1, 21)]
        for prompt, text in zip(prompts, texts, strict=True):
            client.ingest(prompt, [Response(text)])
        owner = [place(problem_digest("run", _i32(p)), ["a", "b"]) for p in prompts]
        assert {0, 1} == set(owner)
        sessions = client.open(prompts)

        def step(i: int) -> list[bool]:
            drafts = client.step(sessions, [[text[i]] for text in texts])
            return [len(d) > 0 and d.tokens[0] == text[i + 1] for d, text in zip(drafts, texts, strict=True)]

        client.step(sessions, [text[:5] for text in texts])
        assert step(5) == [True] * 20
        b.kill()
        assert step(6) == [o == 0 for o in owner]
        assert step(7) == [o == 0 for o in owner]
        b.restart()
        i = 7

        def back() -> bool:
            nonlocal i
            i += 1
            return all(step(i))

        eventually(back)
        assert client.drop_namespace() == 20


def test_partition_between_two_hosts(start_server: Starter) -> None:
    """A real network failure: the server has its own network namespace, which is disconnected and connected again."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    tag = f"hs{os.getpid() % 10000}"

    def ip(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(["ip", *words], capture_output=True, text=True)

    if ip("netns", "add", tag).returncode:
        pytest.skip("network namespaces are not to be had here")
    child = None
    try:
        ip("link", "add", f"{tag}a", "type", "veth", "peer", "name", f"{tag}b", "netns", tag)
        ip("addr", "add", "10.213.7.1/24", "dev", f"{tag}a")
        ip("link", "set", f"{tag}a", "up")
        ip("-n", tag, "addr", "add", "10.213.7.2/24", "dev", f"{tag}b")
        ip("-n", tag, "link", "set", f"{tag}b", "up")
        if ip("-n", tag, "link", "set", "lo", "up").returncode:
            pytest.skip("veth pairs are not to be had here")
        command = ["ip", "netns", "exec", tag, sys.executable, "-m", "histospec.server", "serve", "--insecure"]
        command += ["--listen", "10.213.7.2:6378", "--http", "10.213.7.2:9464"]
        directory = start_server._directory
        child = subprocess.Popen(
            [*command, "--data-dir", str(directory / "ns")], cwd=directory, stderr=subprocess.DEVNULL
        )
        timeouts = Timeouts(call=1, ingest=1, silence=0.5)
        with DraftClient("10.213.7.2:6378", "run", breaker=QUICK, timeouts=timeouts, deadline=0.2) as client:

            def ingested() -> bool:
                try:
                    client.ingest(PROMPT, [Response(TEXT)])
                except Unavailable:
                    return False
                return True

            eventually(ingested)
            sessions = client.open([PROMPT])
            client.step(sessions, [TEXT[:5]])
            until_drafts(client, sessions)
            ip("-n", tag, "link", "set", f"{tag}b", "down")
            for i in range(5, 105):
                assert len(client.step(sessions, [[TEXT[i]]])[0]) == 0
                time.sleep(0.01)  # the forward pass
            assert client.stats().skipped > 50
            with pytest.raises(Unavailable):
                client.history(PROMPT)
            ip("-n", tag, "link", "set", f"{tag}b", "up")
            until_drafts(client, sessions)
            assert one_step(client, sessions)[0].tokens[0] == TEXT[105]
    finally:
        if child is not None:
            child.kill()
            child.wait()
        ip("netns", "del", tag)


# ---- processes ----------------------------------------------------------------------------------------------------


def test_import_has_no_side_effects() -> None:
    script = """
import logging, signal, sys, threading
handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
import histospec.client
assert handlers == [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
assert not logging.getLogger().handlers and not logging.getLogger("histospec").handlers
assert threading.active_count() == 1
assert not [m for m in sys.modules if m.split(".")[0] in ("vllm", "torch", "structlog", "uvloop")]
assert not [m for m in sys.modules if m.startswith(("histospec.server", "histospec.native"))]
client = histospec.client.DraftClient("h:1", "n")
client.open([[1]])
assert threading.active_count() == 1
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.asyncio
async def test_async_face_goes_through_a_restart(server: Server) -> None:
    import asyncio

    async with AsyncDraftClient(server.endpoint, "run", breaker=QUICK, deadline=PATIENT) as client:
        await client.ingest(PROMPT, [Response(TEXT)])
        sessions = await client.open([PROMPT])
        assert len((await client.step(sessions, [TEXT[:5]]))[0])
        await asyncio.to_thread(server.kill)
        assert not len((await client.step(sessions, [[TEXT[5]]]))[0])
        with pytest.raises(Unavailable):
            await client.history(PROMPT)
        await asyncio.to_thread(server.restart)
        for _ in range(1000):
            (draft,) = await client.step(sessions, [[]])
            if len(draft):
                break
            await asyncio.sleep(0.01)
        assert draft.tokens[0] == TEXT[6]


def _i32(tokens: list[int]) -> bytes:
    return np.array(tokens, "<i4").tobytes()
