"""Verify costs that streams report while they step."""

import threading

from histospec.server.observability.engine_counters import LATELY, VerifyCosts


def test_who_has_not_stepped_for_long_no_longer_counts() -> None:
    now = 1000.0
    costs = VerifyCosts(clock=lambda: now)
    idle, busy = costs.open(), costs.open()
    idle["run"] = 0.5, costs.clock()
    now += LATELY
    busy["run"] = 0.1, costs.clock()
    assert costs.lately() == {"run": 0.3}
    now += 1
    assert costs.lately() == {"run": 0.1}
    now += LATELY
    assert costs.lately() == {}


def test_streams_that_say_the_same_are_told_apart() -> None:
    costs = VerifyCosts()
    first, second = costs.open(), costs.open()
    for said in (first, second):
        said["run"] = 0.5, costs.clock()
    costs.close(first)
    costs.close(first)
    assert costs.lately() == {"run": 0.5}
    costs.close(second)
    assert costs.lately() == {}


def test_a_reader_in_another_thread_meets_no_half_of_a_change() -> None:
    costs = VerifyCosts()
    stop, failures, seen = threading.Event(), list[BaseException](), set[str]()

    def read() -> None:
        try:
            while not stop.is_set():
                seen.update(costs.lately())
        except RuntimeError as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    rounds = 0
    while rounds < 20_000 or (not seen and reader.is_alive()):
        said = costs.open()
        for name in ("a", "b", "c"):
            said[name] = 0.5, costs.clock()
        said.pop("b", None)
        costs.close(said)
        rounds += 1
    stop.set()
    reader.join()
    assert not failures
    assert costs.lately() == {}
