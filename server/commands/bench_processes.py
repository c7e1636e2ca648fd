"""The worker processes of `histospec bench`: they start together, none outlives the command, and deaths are errors."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any

from histospec.client.errors import HistoSpecError as ClientError
from histospec.server.process import ENDING, ends

PATIENCE = 2.0  # seconds that a worker may take to end


class Workers:
    """Processes that each call `work(link, *arguments)`. As a context manager, ends them all on exit."""

    def __init__(self, work: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
        self._spawn = multiprocessing.get_context("spawn")
        self._work = work
        self._arguments = arguments
        self._processes: list[BaseProcess] = []
        self._links: list[connection.Connection[Any, Any]] = []

    def __enter__(self) -> "Workers":
        resource_tracker.ensure_running()  # otherwise the first process starts it and unblocks the blocked signals
        try:
            for _ in self._arguments:
                self._start()
            for number, arguments in enumerate(self._arguments):
                self.send(number, arguments)
        except BaseException:
            self._end()
            raise
        return self

    def _start(self) -> None:
        link, theirs = self._spawn.Pipe()
        self._links.append(link)
        process = self._spawn.Process(target=_worker, args=(self._work, theirs), daemon=True)
        # Until a worker handles signals, it would answer Ctrl-C with a traceback.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            process.start()
            self._processes.append(process)
        finally:
            theirs.close()  # so that the link ends with the worker
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def send(self, number: int, message: object) -> None:
        """Sends a message to a worker. Raises ClientError if it has ended."""
        try:
            self._links[number].send(message)
        except OSError:
            raise self._ended(number) from None

    def receive(self) -> list[Any]:
        """Returns the next message of each worker, once all have sent one. Raises ClientError if one has ended."""
        messages: dict[int, Any] = {}
        while len(messages) < len(self._links):
            waiting = {link: number for number, link in enumerate(self._links) if number not in messages}
            for link in connection.wait(list(waiting)):
                number = waiting[link]  # type: ignore[index]
                try:
                    message = self._links[number].recv()
                except (EOFError, OSError):
                    raise self._ended(number) from None
                if isinstance(message, Exception):
                    raise ClientError(f"{self._name(number)}: {message}")
                messages[number] = message
        return [messages[number] for number in range(len(self._links))]

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:  # the workers close their connections
            for process in self._processes:
                process.join(PATIENCE)
        self._end()

    def _end(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(PATIENCE)
            process.kill()
            process.join()
        for link in self._links:
            link.close()

    def _ended(self, number: int) -> ClientError:
        process = self._processes[number]
        process.join(PATIENCE)
        code = process.exitcode
        how = (
            f"was ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"
        )
        return ClientError(f"{self._name(number)} (process {process.pid}) {how}")

    def _name(self, number: int) -> str:
        return f"worker {number + 1} of {len(self._links)}"


def _worker(work: Callable[..., None], link: "connection.Connection[Any, Any]") -> None:
    """Calls `work` with the first message as arguments; sends an error back. Ends when the parent does."""
    for number in filter(ends, ENDING):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, OSError):  # the parent has ended
        arguments = link.recv()
        try:
            work(link, *arguments)
        except Exception as error:
            link.send(Exception(str(error) or repr(error)))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
