"""Asynchronous scheduling in tests: on a CPU, for which vLLM's platform turns it off, and with drafts of the test."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from histospec.client import Draft

NONE = Draft(np.empty(0, np.int32), np.empty(0, np.float32))


def draft_of(tokens: Sequence[int]) -> Draft:
    """A draft of certain tokens."""
    return Draft(np.array(tokens, np.int32), np.ones(len(tokens), np.float32))


@dataclass
class Step:
    """What a client returns for a step: its drafts arrive after `late` further steps; None: never."""

    found: list[Draft]
    late: int | None
    texts: list[list[int]] = field(default_factory=list)
    sessions: list[int] = field(default_factory=list)
    deadline: float = math.inf
    done: bool = False
    rows: list[int] = field(default_factory=list)

    def arrive(self) -> None:
        """Lets the drafts arrive."""
        self.done, self.rows = True, list(range(len(self.found)))

    def answered(self) -> list[int]:
        return self.rows

    def drafts(self) -> list[Draft]:
        return [draft if row in self.rows else NONE for row, draft in enumerate(self.found)]


class Client:
    """Stands for a DraftClient. `draft(text)` drafts; `late()`: how many steps later the drafts of a step arrive."""

    def __init__(self, draft: Callable[[list[int]], Draft], late: Callable[[], int | None] = lambda: 0) -> None:
        self.draft, self.late = draft, late
        self.texts: dict[int, list[int]] = {}
        self.steps: list[Step] = []
        self._last = 0

    def open(
        self, prompts: Any, problems: Any = None, generated: Any = None, seeds: Any = None, position_noise: bool = False
    ) -> list[int]:
        numbers = []
        for prompt, more in zip(prompts, generated, strict=True):
            self._last += 1
            self.texts[self._last] = [*prompt, *more]
            numbers.append(self._last)
        return numbers

    def send(self, sessions: Any, new_tokens: Any, max_tokens: int = 16, verify_cost: float = 0, **_: Any) -> Step:
        for session, tokens in zip(sessions, new_tokens, strict=True):
            self.texts[session] += tokens
        if not max_tokens:
            return Step([NONE] * len(sessions), None)
        for step in self.steps:
            if step.late is not None and not step.rows:
                step.late -= 1
                if step.late <= 0:
                    step.arrive()
        texts = [list(self.texts[each]) for each in sessions]
        self.steps.append(Step([self.draft(text) for text in texts], self.late(), texts, list(sessions)))
        return self.steps[-1]

    def receive(self, step: Step) -> list[Draft]:
        if step.late == 0:
            step.arrive()
        step.done = True
        return step.drafts()

    def finish(self, sessions: Any, commit: bool, **_: Any) -> None:
        assert not commit
        for session in sessions:
            del self.texts[session]

    def flush(self, timeout: float | None = None) -> None:
        pass

    def shutdown(self) -> None:
        pass


def speculator_of(llm: Any) -> Any:
    """The speculator of an engine in this process."""
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner.speculator


def keep_as_set() -> None:
    """Leaves `async_scheduling` as the user has set it, for the engines that this process starts from now on."""
    from vllm.platforms.cpu import CpuPlatform

    check: Any = CpuPlatform.check_and_update_config
    if hasattr(check, "__wrapped__"):
        return

    @functools.wraps(check.__func__)
    def keeping(cls: Any, vllm_config: Any) -> None:
        scheduling = vllm_config.scheduler_config
        asked = scheduling.async_scheduling
        check.__func__(cls, vllm_config)
        scheduling.async_scheduling = asked

    CpuPlatform.check_and_update_config = classmethod(keeping)
