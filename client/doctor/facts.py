"""What was found out, before it is judged."""

from dataclasses import dataclass

from histospec.client.config import Config, Endpoint
from histospec.client.transport.diagnosis import Trouble
from histospec.client.values import Inspection


@dataclass(frozen=True)
class Demand:
    """What vLLM is going to ask for."""

    draft_tokens: int = 16
    """`num_speculative_tokens`"""
    sequences: int = 256
    """`max_num_seqs`"""


@dataclass(frozen=True)
class Failure:
    """A call that failed."""

    code: str
    """Of gRPC, such as UNAUTHENTICATED."""
    details: str


@dataclass(frozen=True)
class ShardFacts:
    """One shard."""

    endpoint: Endpoint
    trouble: Trouble | None = None
    """What keeps a connection from being made; then the rest is not known."""
    failure: Failure | None = None
    """Why it does not say what it knows; None: it does."""
    inspection: Inspection | None = None
    ahead: float = 0.0
    """Seconds that its clock is ahead of this machine's ..."""
    doubt: float = 0.0
    """... give or take this: half the time of the call."""
    drafts: bool = True
    """Whether it is a draft server at all."""
    known: tuple[Endpoint, ...] = ()
    """The shards that it knows, itself among them."""
    steps: tuple[float, ...] = ()
    """Seconds that each step took, from here to the engine and back."""
    step_failure: Failure | None = None


@dataclass(frozen=True)
class Vllm:
    """The vLLM of this environment."""

    version: str
    runner: str | None
    """VLLM_USE_V2_MODEL_RUNNER; None: it is not set."""


@dataclass(frozen=True)
class Facts:
    """All of it."""

    config: Config
    version: str
    """Of this client."""
    demand: Demand = Demand()
    shards: tuple[ShardFacts, ...] = ()
    others: tuple[Endpoint, ...] = ()
    """Shards that the listed ones know, and the list lacks."""
    vllm: Vllm | None = None
    """None: it is not installed here."""
    adapter: str = ""
    """What is wrong with the settings of the vLLM adapter; empty where nothing is."""

    @property
    def answering(self) -> list[tuple[ShardFacts, Inspection]]:
        """The shards that say what they know."""
        return [(shard, shard.inspection) for shard in self.shards if shard.inspection is not None]
