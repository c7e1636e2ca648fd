"""The facts that the checks work on."""

from dataclasses import dataclass

from histospec.client.config import Config, Endpoint
from histospec.client.transport.diagnosis import Trouble
from histospec.client.values import Inspection


@dataclass(frozen=True)
class Demand:
    """What vLLM will ask for."""

    draft_tokens: int = 16
    """`num_speculative_tokens`"""
    sequences: int = 256
    """`max_num_seqs`"""


@dataclass(frozen=True)
class Failure:
    """A call that failed."""

    code: str
    """Status code of gRPC, such as UNAUTHENTICATED."""
    details: str


@dataclass(frozen=True)
class ShardFacts:
    """Facts about one shard."""

    endpoint: Endpoint
    trouble: Trouble | None = None
    """Why there is no connection; the other facts are then missing."""
    failure: Failure | None = None
    """Why the call Inspect failed; None if it succeeded."""
    inspection: Inspection | None = None
    ahead: float = 0.0
    """How many seconds its clock is ahead of this machine's."""
    doubt: float = 0.0
    """Uncertainty of `ahead`, in seconds: half the time of the call."""
    drafts: bool = True
    """Whether it is a draft server."""
    known: tuple[Endpoint, ...] = ()
    """The shards that it knows, including itself."""
    steps: tuple[float, ...] = ()
    """Seconds that each step took, from here to the engine and back."""
    step_failure: Failure | None = None
    """Why a step failed; None if all succeeded."""


@dataclass(frozen=True)
class Vllm:
    """Facts about vLLM in this environment."""

    version: str
    runner: str | None
    """Value of VLLM_USE_V2_MODEL_RUNNER; None if it is not set."""


@dataclass(frozen=True)
class Facts:
    """All facts."""

    config: Config
    version: str
    """Version of this client."""
    demand: Demand = Demand()
    shards: tuple[ShardFacts, ...] = ()
    others: tuple[Endpoint, ...] = ()
    """Shards that the listed shards know but the list does not contain."""
    vllm: Vllm | None = None
    """None if vLLM is not installed here."""
    adapter: str = ""
    """What is wrong with the settings of the vLLM adapter; empty if they are valid."""

    @property
    def answering(self) -> list[tuple[ShardFacts, Inspection]]:
        """The shards whose call Inspect succeeded."""
        return [(shard, shard.inspection) for shard in self.shards if shard.inspection is not None]
