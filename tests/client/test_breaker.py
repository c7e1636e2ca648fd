"""The breaker's states, with the clock in the test's hands."""

from histospec.client.config import Breaker
from histospec.client.core.recovery import CircuitBreaker

CONFIG = Breaker(failures=3, cooldown=1.0, cooldown_max=4.0, jitter=0.5)


def opened() -> CircuitBreaker:
    breaker = CircuitBreaker(CONFIG)
    for _ in range(3):
        assert breaker.allows(0)
        breaker.failure(0)
    return breaker


def test_opens_after_failures_in_a_row_only() -> None:
    breaker = CircuitBreaker(CONFIG)
    for _ in range(10):
        breaker.failure(0)
        breaker.failure(0)
        breaker.success()
    assert breaker.state == "closed"
    assert opened().state == "open"


def test_one_try_after_the_cooldown() -> None:
    breaker = opened()
    assert not breaker.allows(0.99)
    assert breaker.allows(1.5)
    assert breaker.state == "trying"
    assert not breaker.allows(1.5)


def test_success_closes_and_forgets() -> None:
    breaker = opened()
    assert breaker.allows(2)
    breaker.success()
    assert breaker.state == "closed"
    breaker.failure(2)
    assert breaker.state == "closed"


def test_cooldown_doubles_up_to_the_limit() -> None:
    breaker, now = opened(), 0.0
    for cooldown in (1, 2, 4, 4, 4):
        assert not breaker.allows(now + 0.99 * cooldown)
        now += 1.5 * cooldown
        assert breaker.allows(now)
        breaker.failure(now)


def test_where_no_step_waits_the_cooldown_stays_short() -> None:
    config = Breaker(failures=3, cooldown=1.0, cooldown_max=16.0, reconnect=2.0, jitter=0.0)
    breaker = CircuitBreaker(config)
    for _ in range(3):
        breaker.failure(0, soon=True)
    now = 0.0
    for cooldown in (1, 2, 2, 2):
        now += cooldown
        assert not breaker.allows(now - 0.01)
        assert breaker.allows(now)
        breaker.failure(now, soon=True)
    for cooldown in (2, 4, 8, 16):
        now += cooldown
        assert not breaker.allows(now - 0.01)
        assert breaker.allows(now)
        breaker.failure(now)
    breaker.failure(now)
    assert not breaker.allows(now + 2)
    breaker.failure(now, soon=True)  # the late stream is closed: the next try is a connection
    assert breaker.allows(now + 2)


def test_a_connection_closes_the_breaker_but_proves_nothing() -> None:
    """A shard that ends every stream is tried less and less often, although every connection succeeds."""
    breaker, cooldowns = opened(), []
    now = 0.0
    for _ in range(4):
        begun = now
        while not breaker.allows(now):
            now += 0.01
        cooldowns.append(now - begun)
        breaker.connected()
        assert breaker.state == "closed"
        for _ in range(3):
            breaker.failure(now)
        assert not breaker.allows(now)
    assert cooldowns[0] < 1.6 < cooldowns[1]
    assert cooldowns[-1] > 3.9
    while not breaker.allows(now):
        now += 0.01
    breaker.connected()
    breaker.success()
    for _ in range(3):
        breaker.failure(now)
    assert breaker.allows(now + 1.5)


def test_late_news_of_old_steps_does_not_lengthen_the_cooldown() -> None:
    breaker = opened()
    for _ in range(10):
        breaker.failure(0.5)
    assert breaker.allows(1.5)


def test_a_try_that_nobody_followed_up_is_repeated() -> None:
    breaker = opened()
    assert breaker.allows(1.5)
    assert breaker.allows(2.5)


def test_cooldowns_differ() -> None:
    assert 0 < sum(opened().allows(1.25) for _ in range(200)) < 200
