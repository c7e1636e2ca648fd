"""Calls in other threads, because a signal handler may raise KeyboardInterrupt in the main thread at any moment.

An interrupt ends the caller's wait, not the call.
"""

import _thread
import asyncio
import queue
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

S = TypeVar("S")
T = TypeVar("T")

AT_A_TIME = 16
"""Calls in parallel: a call mostly waits for the server's disk or for the answer."""


def side_by_side(function: Callable[[S], T], inputs: Sequence[S]) -> list[T]:
    """Calls a function for each input, in threads. Returns the results in the order of the inputs.

    After an error of a function, or an interrupt, it waits for no thread, and begins no further call. It uses no pool
    of `concurrent.futures`: an interrupt may leave a lock of a future taken, for which its thread would wait for ever.
    Where no thread can begin, the caller makes the calls.
    """
    inputs = list(inputs)
    left = iter(range(len(inputs)))
    results: queue.SimpleQueue[tuple[int, T | None, BaseException | None]] = queue.SimpleQueue()
    over = False

    def work() -> None:
        for i in left:
            if over:
                return
            try:
                results.put((i, function(inputs[i]), None))
            except BaseException as error:
                results.put((i, None, error))

    ordered: list[Any] = [None] * len(inputs)
    try:
        try:
            for _ in range(min(AT_A_TIME, len(inputs))):
                _thread.start_new_thread(work, ())
        except RuntimeError:  # the interpreter shuts down
            work()
        for _ in inputs:
            i, ordered[i], error = results.get()
            if error is not None:
                raise error
    finally:
        over = True
    return ordered


def uninterrupted(function: Callable[[], T]) -> T:
    """Calls a function on the running loop, in another thread. Raises what the function raises."""
    loop = asyncio.get_running_loop()

    def there(_: None) -> T:
        asyncio._set_running_loop(loop)
        return function()

    return side_by_side(there, [None])[0]
