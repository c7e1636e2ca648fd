"""The client's interface: its methods, how it ends, and the repr of its values."""

import asyncio
import contextlib
import importlib.metadata
import inspect
import textwrap
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import histospec.client
from histospec.client import AsyncDraftClient, Draft, DraftClient, Response, Timeouts, Unavailable, WrongLoop
from tests.support.clients import texts
from tests.support.servers import Server, Starter

NOWHERE = "127.0.0.1:9"
QUICK = Timeouts(step=0.01, call=0.2, ingest=0.2, shutdown=0.1)
PATIENT = Timeouts(step=60.0, shutdown=60.0)


def test_finish_and_close_commit_alike(shared_server: Server) -> None:
    with DraftClient(shared_server.endpoint, "faces", timeouts=PATIENT) as client:
        ends: list[Callable[..., None]] = [client.finish, client.close]
        for number, end in enumerate(ends):
            (session,) = client.open([[number]])
            client.step([session], [[5, 6]])
            end([session], commit=True, epochs=3, rewards=0.5)
            (stored,) = client.history([number])
            assert (texts([stored]), stored.epoch, stored.reward) == ([[5, 6]], 3, 0.5)


def test_close_without_arguments_ends_the_client(shared_server: Server) -> None:
    """As with a file: close() sends waiting messages, and may be called twice."""
    client = DraftClient(shared_server.endpoint, "faces-closed", timeouts=PATIENT)
    with contextlib.closing(client):
        (session,) = client.open([[1]])
        client.step([session], [[5, 6]])
        client.close([session])
    client.close()
    client.shutdown()
    client.flush()
    assert [len(draft) for draft in client.step(client.open([[1]]), [[2]])] == [0]
    assert repr(client).endswith("pending_commits=0 shut down>")
    with pytest.raises(Unavailable, match="this client is shut down"):
        client.history([1])
    with DraftClient(shared_server.endpoint, "faces-closed", timeouts=PATIENT) as other:
        assert texts(other.history([1])) == [[5, 6]]


def test_close_of_no_session_is_not_the_end(shared_server: Server) -> None:
    with DraftClient(shared_server.endpoint, "faces-empty", timeouts=PATIENT) as client:
        client.close([])
        client.close(sessions=[])
        with pytest.raises(ValueError, match="sessions: must be a list of session ids, is None"):
            client.close(None)
        with pytest.raises(TypeError, match="sessions"):
            client.close(commit=False)
        assert client.history([1]) == []


@pytest.mark.asyncio
async def test_the_asyncio_client_ends_in_the_same_ways(shared_server: Server) -> None:
    ways: list[Callable[[AsyncDraftClient], Awaitable[None]]]
    ways = [AsyncDraftClient.close, AsyncDraftClient.aclose, AsyncDraftClient.shutdown]
    for number, end in enumerate(ways):
        client = AsyncDraftClient(shared_server.endpoint, "faces-async", timeouts=PATIENT)
        (session,) = await client.open([[number]])
        await client.step([session], [[5, 6]])
        await (client.close([session]) if number else client.finish([session]))
        await end(client)
        await end(client)
        with pytest.raises(Unavailable, match="this client is shut down"):
            await client.history([number])
        async with contextlib.aclosing(
            AsyncDraftClient(shared_server.endpoint, "faces-async", timeouts=PATIENT)
        ) as other:
            assert texts(await other.history([number])) == [[5, 6]]
            await other.close([])
            assert len(await other.history([number])) == 1


def test_both_faces_have_the_same_methods() -> None:
    def public(face: type) -> dict[str, list[str]]:
        methods = inspect.getmembers(face, inspect.isfunction)
        return {name: list(inspect.signature(m).parameters) for name, m in methods if not name.startswith("_")}

    blocking, loop = public(DraftClient), public(AsyncDraftClient)
    assert loop.pop("aclose") == ["self"]
    assert blocking == loop
    for face in (DraftClient, AsyncDraftClient):
        for name in blocking:
            assert inspect.getdoc(getattr(face, name)), name


def test_help_says_how_a_client_is_used_and_ended(shared_server: Server) -> None:
    said = inspect.getdoc(DraftClient) or ""
    assert "`close()` is `shutdown()`" in said
    example = textwrap.dedent(said.split("::\n", 1)[1].split("\n\n`close()`")[0])
    names: dict[str, Any] = {"DraftClient": partial(DraftClient, timeouts=PATIENT), "Response": Response}
    exec(example.replace('"host:6378"', repr(shared_server.endpoint)).replace("run-1", "faces-help"), names)
    assert [draft.tokens.tolist() for draft in names["drafts"]] == [[6, 7]]
    with DraftClient(shared_server.endpoint, "faces-help", timeouts=PATIENT) as client:
        assert texts(client.history([1, 2, 3])) == [[4, 5, 6, 7], [4, 5]]
    assert "integers" in (DraftClient.open.__doc__ or "")  # session ids
    assert "histospec_accepted_tokens_total" in (histospec.client.Stats.__doc__ or "")


def test_a_client_prints_what_it_is_and_how_it_is_doing(start_server: Starter) -> None:
    server = start_server()
    with DraftClient(
        f"a={server.endpoint},b=127.0.0.1:9", "run", token="a-very-secret-token", timeouts=QUICK
    ) as client:
        start = f"<DraftClient namespace='run' endpoint=a={server.endpoint},b=127.0.0.1:9 breakers="
        assert repr(client) == start + "{'a': 'closed', 'b': 'closed'} sessions=0 pending_commits=0>"
        sessions = client.open([[n] for n in range(64)])
        for _ in range(4):
            client.step(sessions, [[1]] * 64)
        server.kill()
        client.finish(sessions[:2])
        shown = repr(client)
        assert "'b': 'open'" in shown
        assert shown.endswith("sessions=62 pending_commits=2>")
        assert "secret" not in shown + repr(client.config)
        client.finish(sessions[2:], commit=False)


def test_a_client_prints_while_its_lock_is_held() -> None:
    """By another thread, or by one that a debugger has stopped."""
    client = DraftClient(f"discover://{NOWHERE}", "run", timeouts=QUICK)
    told: list[str] = []
    with client._core._lock:
        thread = threading.Thread(target=lambda: told.append(repr(client)), daemon=True)
        thread.start()
        thread.join(60)
    assert told == [
        f"<DraftClient namespace='run' endpoint=discover://{NOWHERE} breakers={{'discover://{NOWHERE}': "
        "'open'} sessions=0 "
        "pending_commits=0>"
    ]
    assert repr(AsyncDraftClient(NOWHERE, "run")).startswith("<AsyncDraftClient namespace='run' endpoint=127.0.0.1:9 ")


def test_values_print_briefly() -> None:
    long = np.arange(100_000)
    assert repr(Response([1, 2], logprobs=[-0.123456, -2.0], reward=1.0, epoch=3)) == (
        "Response([1, 2], logprobs=[-0.123, -2], reward=1.0, epoch=3)"
    )
    assert repr(Response(long, generated=[True], seed=0)) == (
        "Response([0, 1, 2, 3, 4, 5, 6, 7, ... 100000 in all], generated=[True], seed=0)"
    )
    assert (
        repr(Draft(np.array([5, 6], np.int32), np.array([0.9, 0.25], np.float32))) == "Draft([5, 6], probs=[0.9, 0.25])"
    )
    assert repr(Draft(np.empty(0, np.int32), np.empty(0, np.float32))) == "Draft([], probs=[])"
    for odd in (None, 5, "text", {1, 2}, {3: 4}, [[1]], object):
        assert repr(Response(odd)).startswith("Response(")  # type: ignore[arg-type]


def test_a_step_on_its_way_prints_how_far_it_is(shared_server: Server) -> None:
    with DraftClient(shared_server.endpoint, "faces-pending", timeouts=PATIENT) as client:
        sessions = client.open([[1], [2], [3]])
        pending = client.send(sessions, [[1]] * 3)
        assert repr(pending) in [f"<Pending step of 3 sessions: {done} of 1 shards done>" for done in (0, 1)]
        client.receive(pending)
        assert repr(pending) == "<Pending step of 3 sessions: 1 of 1 shards done>"
        client.finish(sessions, commit=False)


def test_the_version_is_that_of_the_package() -> None:
    assert histospec.client.__version__ == importlib.metadata.version("histospec")
    assert "__version__" in histospec.client.__all__
    with pytest.raises(AttributeError, match="no attribute 'version'"):
        histospec.client.version  # type: ignore[attr-defined]  # noqa: B018


def test_an_asyncio_client_belongs_to_one_loop(shared_server: Server) -> None:
    """From another loop, each call says so; so it does once its own loop is closed. `shutdown` then needs no loop."""
    client = AsyncDraftClient(shared_server.endpoint, "faces-loops", timeouts=PATIENT)
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: client.open([[1]]),
        lambda: client.step([1], [[1]]),
        lambda: client.finish([1]),
        client.flush,
        lambda: client.history([1]),
        lambda: client.ingest([1], [Response([1])]),
        lambda: client.predict_lengths([[1]]),
        client.topology,
        client.inspect,
        lambda: client.rewind(1),
    ]

    async def refused(why: str) -> None:
        for call in calls:
            with pytest.raises(WrongLoop, match=f"belongs to the event loop of its first call.* which {why}; make a"):
                await call()

    async def used() -> None:
        await client.step(await client.open([[1]]), [[5]])
        await asyncio.to_thread(asyncio.run, refused("is not the running one"))
        assert len(await client.inspect()) == 1

    asyncio.run(used())
    asyncio.run(refused("is closed"))
    asyncio.run(client.shutdown())
    assert repr(client).endswith(" shut down>")
