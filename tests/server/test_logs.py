"""Lines that a stranger can cause."""

from histospec.server.logs import Throttle


def test_some_lines_pass_and_the_rest_is_counted():
    throttle = Throttle(lines=3, seconds=10.0)
    assert [throttle.admits("a", now=0.1 * i) for i in range(5)] == [{}, {}, {}, None, None]
    assert throttle.admits("b", now=1.0) == {}  # another kind
    assert throttle.admits("a", now=9.9) is None
    assert throttle.admits("a", now=10.0) == {"left_out": 3}
    assert [throttle.admits("a", now=11.0) for _ in range(3)] == [{}, {}, None]
    assert throttle.admits("b", now=12.0) == {}  # nothing of it was left out
