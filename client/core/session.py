"""What the client remembers of a session: enough to open it again on a server that has forgotten it."""

from dataclasses import dataclass


class Session:
    """One running generation. Its tokens are kept as they travel: little-endian int32 bytes."""

    __slots__ = ("generated", "length", "number", "opened", "problem", "prompt", "refused", "seed")

    def __init__(
        self,
        number: int,
        prompt: bytes,
        problem: str,
        generated: bytes = b"",
        seed: int | None = None,
    ) -> None:
        self.number = number
        self.prompt = prompt
        self.problem = problem
        self.generated = bytearray(generated)
        self.length = len(generated) // 4  # in tokens; kept beside, because a step reads it of every session
        self.seed = seed
        self.opened = False
        self.refused = False

    @property
    def bytes(self) -> int:
        """About what opening it takes on the wire."""
        return len(self.prompt) + len(self.generated)


@dataclass(slots=True, eq=False)
class Commit:
    """A finished response on its way into the history; kept until the server has acknowledged it."""

    session: Session
    epoch: int | None
    reward: float | None
    logprobs: bytes
    changes: int = 0
    attempts: int = 0
    """How often a server turned it down."""
    number: int = 0
    """Grows in the order in which they finished."""

    @property
    def bytes(self) -> int:
        """What it holds in memory, and about what it takes on the wire."""
        return self.session.bytes + len(self.logprobs)
