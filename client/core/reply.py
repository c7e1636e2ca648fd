"""The values of a server's reply on a Draft stream, and what the client waits for."""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from histospec.client.core.commits import Commit
from histospec.client.core.outage_log import short
from histospec.client.core.step import Drafts, GarbledReply, Part, array
from histospec.protocol.arrays import INT32, UINT64
from histospec.v1 import draft_pb2 as pb

NOTHING: Mapping[int, str] = MappingProxyType({})


class Awaited(NamedTuple):
    """The drafts that a message has to bring. A large step has several messages."""

    part: Part
    rows: Sequence[int]
    """Rows of the part."""
    most: int = 0
    """Tokens of a draft that the message asks for."""


class Reply(NamedTuple):
    """The meaning of one response."""

    part: Part | None
    """The part whose last drafts it brought."""
    drafts: Drafts | None
    """None if the message had no step, or if the caller has stopped waiting."""
    acknowledged: Sequence[Commit] = ()
    postponed: Sequence[Commit] = ()
    """Commits that the store could not take now."""
    why_postponed: str = ""
    unknown: Sequence[Commit] = ()
    """Commits of sessions that the server does not hold."""
    turned_down: Sequence[Commit] = ()
    """Commits of sessions that the server refused."""
    refused: Mapping[int, str] = NOTHING
    """Sessions that will never get drafts, and the reasons."""
    too_old: int = 0
    """How many of the acknowledged commits the server did not keep."""
    continued: Mapping[int, int] = MappingProxyType({})
    """Sessions that continue an aborted response, and the length of its prompt."""

    @classmethod
    def of(
        cls,
        response: pb.DraftResponse,
        commits: Sequence[Commit],
        unknown: Collection[int],
        continued: Mapping[int, int],
        part: Part | None,
        drafts: Drafts | None,
    ) -> "Reply":
        """Returns what a response says about commits.

        The server does not hold the `unknown` sessions; the `continued` ones continue an aborted response.
        """
        refused = {r.session: short(r.reason) for r in response.refusals if not r.later}
        later = {r.session: short(r.reason) for r in response.refusals if r.later}
        return cls(
            part=part,
            drafts=drafts,
            acknowledged=[c for c in commits if c.session.number not in {*unknown, *refused, *later}],
            postponed=[c for c in commits if c.session.number in later and c.session.number not in unknown],
            why_postponed=next(iter(later.values()), ""),
            unknown=[c for c in commits if c.session.number in unknown],
            turned_down=[c for c in commits if c.session.number in refused and c.session.number not in unknown],
            refused=refused,
            too_old=response.too_old,
            continued=continued,
        )


def continued_in(response: pb.DraftResponse) -> dict[int, int]:
    """Returns the sessions that continue an aborted response, and the lengths of its prompts. Raises GarbledReply."""
    sessions, prompts = array("continued", response.continued, UINT64), array("prompts", response.prompts, INT32)
    if len(sessions) != len(prompts):
        raise GarbledReply(f"prompts: {len(prompts)} lengths for {len(sessions)} sessions")
    return dict(zip(sessions.tolist(), prompts.tolist(), strict=True))
