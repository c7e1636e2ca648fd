"""The sessions of a scheduler whose workers draft: each exists only to commit a finished response.

The workers' sessions have the running texts, but a worker does not know where vLLM cuts a response. So the scheduler
opens a session when the response is final, with the whole text, and commits it in the same message.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from histospec.client.engines.options import RequestOptions
from histospec.client.engines.sessions import RequestSessions
from histospec.client.engines.versions import Version

if TYPE_CHECKING:
    from histospec.client import DraftClient


class ResponseCommits(RequestSessions):
    """As RequestSessions, for whole responses. Not thread-safe: it belongs to the scheduler's thread."""

    def __init__(self, client: "DraftClient", max_tokens: int) -> None:
        super().__init__(client, max_tokens)
        self._running: dict[str, tuple[Sequence[int], RequestOptions]] = {}

    def begin(self, request_id: str, prompt: Sequence[int], options: RequestOptions) -> None:
        """Notes a request that will have a response. The server learns of it at its end."""
        self._running[request_id] = prompt, options

    def sent(self, request_id: str) -> int | None:
        """Returns 0 for a request that will have a response; None for another one."""
        return 0 if request_id in self._running else None

    def options(self, request_id: str) -> RequestOptions | None:
        """Returns the options of a request that will have a response; None for another one."""
        found = self._running.get(request_id)
        return None if found is None else found[1]

    def finish(self, request_id: str, output: Sequence[int] | None, version: Version, whole: bool = True) -> None:
        """As RequestSessions."""
        prompt, options = self._running.pop(request_id, ((), None))
        if options is None or not output or options.commit is False:
            return
        generated = (options.generated or 0) + len(output)
        super().begin(request_id, [*prompt, *output], options._replace(generated=generated))
        self._sessions[request_id].sent = len(output)
        super().finish(request_id, output, version, whole)

    def settle(self) -> None:
        """As RequestSessions; while requests run, no step carries the closes, so this sends them, without a wait.

        Aborts wait at most the client's deadline. A response that itself continues an aborted one must name the first
        prompt, and only the server knows it: it answers so to the step that opens the session.
        """
        due = bool(self._commits or self._aborts)
        if self._aborts:
            opened = [session.id for session, _ in self._aborts]
            self.client.receive(self.client.send(opened, [()] * len(opened), max_tokens=1))  # 0 would not wait
        super().settle()
        if due and self.running:
            self.client.flush(0)

    @property
    def running(self) -> bool:
        """Whether there are requests that have not ended."""
        return bool(self._running)

    def forget(self) -> None:
        """As RequestSessions."""
        self._running.clear()
        super().forget()
