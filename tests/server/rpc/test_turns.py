"""Later turns without a problem id: drafted from and stored with the problem with which their prompt begins."""

from tests.support.servers import Server
from tests.support.wires import Connector, Wire

PROMPT = [1, 2, 3]
ANSWER, TOOL, SECOND = list(range(100, 130)), list(range(200, 210)), list(range(300, 330))
LATER = PROMPT + ANSWER + TOOL


def turn(wire: Wire, prompt: list[int], response: list[int]) -> list[int]:
    """Opens, drafts, generates the response and commits it. Returns the draft after its first four tokens."""
    stream = wire.stream()
    answer = stream.ask(opens=[wire.open(1, prompt)], step=wire.step([1], [response[:4]]))
    stream.ask(step=wire.step([1], [response[4:]], [4]), closes=[wire.commit(1, len(response))])
    stream.end()
    return wire.drafts(answer)[0]


def test_turns_are_stored_with_their_problem_and_found_after_a_restart(server: Server, connect: Connector) -> None:
    wire = connect(server.endpoint)
    assert turn(wire, PROMPT, ANSWER) == []
    assert turn(wire, LATER, SECOND) == []
    assert wire.history(PROMPT) == [ANSWER, SECOND]
    assert wire.history(LATER) == []

    server.drain()
    server.start()
    wire = connect(server.endpoint)
    other = ANSWER[:20] + list(range(400, 410))
    assert turn(wire, PROMPT, other)[:1] == ANSWER[4:5]
    draft = turn(wire, PROMPT + other + TOOL, SECOND)
    assert draft
    assert draft == SECOND[4 : 4 + len(draft)]
    assert wire.history(PROMPT) == [ANSWER, SECOND, other, SECOND]


def test_a_turn_with_a_problem_id_stays_with_its_id(wire: Wire) -> None:
    turn(wire, PROMPT, ANSWER)
    stream = wire.stream()
    stream.ask(opens=[wire.open(1, LATER, problem="p")], step=wire.step([1], [SECOND]))
    stream.ask(step=wire.step([], []), closes=[wire.commit(1, len(SECOND))])
    stream.end()
    assert wire.history(PROMPT) == [ANSWER]
    assert wire.history(LATER, problem="p") == [SECOND]
