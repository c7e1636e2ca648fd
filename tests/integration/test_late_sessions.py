"""Sessions that a worker opens only when a response ends, with all of its tokens."""

import signal
from threading import Timer

from histospec.client import DraftClient
from tests.support.clients import texts
from tests.support.servers import Server


def test_parts_of_an_aborted_response_are_one(shared_server: Server) -> None:
    """
    1. Each part is opened with its tokens: its prompt is the first one and all tokens before, as a trainer sends it.
    2. A part that is aborted opens with a step, whose answer names the first prompt.
    3. The last part commits the whole response, to the first prompt.
    """
    prompt, parts = [1, 2, 3], [[4, 5], [6], [7, 8, 9]]
    text = list(prompt)
    for number, part in enumerate(parts):
        with DraftClient(shared_server.endpoint, namespace="late-sessions", deadline=5) as client:
            (session,) = client.open([text], generated=[part])
            last = number == len(parts) - 1
            if not last:
                client.step([session], [[]], max_tokens=1)
            client.finish([session], commit=last, aborted=not last)
            client.flush(5)
            if last:
                assert texts(client.history(prompt)) == [[4, 5, 6, 7, 8, 9]]
                assert client.history(text) == []
        text += part


def test_an_abort_is_with_the_server_when_a_flush_returns(server: Server) -> None:
    """The client ends right after; a server that was busy meanwhile must not lose the abort with the connection."""
    prompt, first, rest = [1, 2, 3], [4, 5], [6, 7]
    with DraftClient(server.endpoint, namespace="late-sessions") as client:
        (session,) = client.open([prompt])
        client.step([session], [first], max_tokens=1)
        server.signal(signal.SIGSTOP)
        awake = Timer(0.5, server.signal, [signal.SIGCONT])
        awake.start()
        client.finish([session], commit=False, aborted=True)
        client.flush(30)
    awake.join()
    with DraftClient(server.endpoint, namespace="late-sessions") as client:
        (session,) = client.open([prompt + first], generated=[rest])
        client.finish([session])
        client.flush(30)
        assert texts(client.history(prompt)) == [first + rest]
