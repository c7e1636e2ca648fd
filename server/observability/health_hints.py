"""Turns the numbers of a server into hints in plain language: what they mean, and what to do."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from histospec.protocol.costs import DEFAULT_DEADLINE, NOTHING_PAYS
from histospec.server.history.namespaces import look_alikes
from histospec.server.security.rejections import Rejected
from histospec.server.stores.interface import StoreSize

FULL_SHARE = 0.9  # of the memory budget, or of the store's limit
SCARCE_SHARE = 0.1  # of the disk
MISSED_SHARE = 0.2  # of the lookups
HARDLY_ANY = 0.05  # of the lookups
LOW_ACCEPTANCE = 0.2  # of the drafted tokens
A_FEW = 20  # lookups, below which nothing is concluded
AN_EPOCH = 10_000  # lookups without a hit; a first epoch is hardly longer
ENOUGH_DRAFTED = 1_000  # tokens

MOST_REJECTED = 5  # reasons that the hint lists

Level = Literal["bad", "warn", "info"]


class Hint(NamedTuple):
    """One fact with its cause and remedy."""

    level: Level
    """bad: something is broken. warn: drafts are lost. info: good to know, often without a need to act."""
    title: str
    text: str
    """The cause, and what to do."""


class NamespaceFacts(NamedTuple):
    """The recent numbers of one namespace."""

    name: str
    hits: float = 0
    misses: float = 0
    misnamed: float = 0
    """Of the misses, sessions whose prompt has history under another problem id, or without one."""
    newest_epoch: int = 0
    history_responses: float = 0
    hits_ever: float = 0
    """Sessions opened since the start."""
    lookups_ever: float = 0
    drafted: float = 0
    """Draft tokens from history."""
    accepted: float = 0
    """Accepted tokens of these."""
    same_weights: bool = False
    """Whether the weights that generate have written the text that drafts come from."""
    behind: float = 0
    """Responses that arrived since the last one of the newest epoch."""
    behind_epoch: int = 0
    """The newest epoch of these."""
    verify_cost: float | None = None

    @property
    def lookups(self) -> float:
        """Sessions opened recently."""
        return self.hits + self.misses


class Facts(NamedTuple):
    """The numbers behind the hints. Counters cover the last ten minutes unless they say otherwise."""

    waiting: Mapping[str, str] = {}
    """The parts that are not ready, and what each waits for."""
    streams: float = 0
    lookups_ever: float = 0
    evicted: float = 0
    """Responses evicted because memory was full."""
    index_bytes: float = 0
    memory: float = 1
    """The memory budget in bytes."""
    store_errors: float = 0
    too_old: float = 0
    """Responses that the store did not keep, because they were too old."""
    latest_too_old: str = ""
    """The epoch and namespace of the latest of these, in words."""
    unreadable: Mapping[str, str] = {}
    """The files that cannot be read now, and why."""
    rejected: Sequence[Rejected] = ()
    """Callers that the server rejected because of their token."""
    store_trouble: str = ""
    """Why the store accepts nothing until a person acts."""
    store_hazard: str = ""
    """Which setting may make the store lose responses."""
    store_outage: str = ""
    """Why the store does not answer now."""
    damaged: float = 0
    """Stored responses left out as damaged since the start."""
    retention_paused: str = ""
    """Why retention waits for a person."""
    store_size: StoreSize = StoreSize()
    draft_p99: float | None = None
    """Seconds."""
    away: Sequence[str] = ()
    """The names of shards that do not serve."""
    namespaces: Sequence[NamespaceFacts] = ()


def hints(facts: Facts) -> list[Hint]:
    """Returns hints, the most severe first."""
    found = [*_faults(facts), *_limits(facts)]
    for namespace in facts.namespaces:
        found += _about(namespace, facts)
    order: list[Level] = ["bad", "warn", "info"]
    return sorted(found, key=lambda hint: order.index(hint.level))


def _faults(facts: Facts) -> Iterator[Hint]:
    if "drain" in facts.waiting:
        text = "It refuses new calls and stops when the open streams have ended."
        yield Hint("info", "This shard is draining", text)
    elif facts.waiting:
        why = "; ".join(f"{part}: {reason}" for part, reason in facts.waiting.items())
        text = (
            f"The shard drafts from running sessions. Callers that store or read must retry later ({why}). Wait "
            "until the shard is ready."
        )
        yield Hint("info", "The store is not open yet", text)
    if facts.store_trouble:
        text = (
            f"{facts.store_trouble}. The server acknowledges no response, and workers keep theirs; see "
            "HistoSpecStoreUnusable in docs/runbooks.md."
        )
        yield Hint("bad", "Nothing can be stored", text)
    if facts.store_outage:
        text = f"{facts.store_outage}. The server refuses ingests and commits meanwhile, and still drafts."
        yield Hint("bad", "The store does not answer", text)
    if facts.damaged:
        text = (
            f"At least {_count(facts.damaged, 'stored response')} could not be read or had changed on disk, and were "
            "left out. The log names the file that was set aside. Check the disk and the memory of this machine, and "
            "see HistoSpecStoreDamaged in docs/runbooks.md."
        )
        yield Hint("bad", "The store was damaged", text)
    if facts.store_hazard:
        text = (
            f"{facts.store_hazard}. When its memory is full, it deletes stored responses, and does not say so. With "
            "noeviction it refuses new ones, and the server reports a full store."
        )
        yield Hint("warn", "The store may delete responses", text)
    if facts.retention_paused:
        text = (
            f"{facts.retention_paused[0].upper()}{facts.retention_paused[1:]}. Retention deletes nothing until then. "
            "Check the clock, then run `histospec forget --older-than DAYS`, which resumes it."
        )
        yield Hint("warn", "Retention is paused", text)
    if facts.store_errors:
        text = (
            f"{_count(facts.store_errors, 'request')} failed in the last ten minutes. Drafts continue from the index, "
            "but the store lacks these responses. Look at the errors below, then at the disk or at Redis."
        )
        yield Hint("bad", "The store fails", text)
    if facts.too_old:
        text = (
            f"In the last ten minutes, {_count(facts.too_old, 'response')} came with an epoch older than those that "
            f"the store keeps of the problem (--history-epochs), and did not stay. The latest was of "
            f"{facts.latest_too_old}. If newer epochs are wrong, or the run went back to a checkpoint, rewind the "
            "namespace to its true epoch: client.rewind(epoch)."
        )
        yield Hint("warn", "Responses are too old to keep", text)
    for name, why in facts.unreadable.items():
        text = (
            f"{why}. The previous contents stay in force: revoked entries still work, new ones do not yet. Correct the "
            "files or their permissions; the server rereads them within seconds."
        )
        yield Hint("bad", f"The {name} cannot be read", text)
    if facts.rejected:
        seen = facts.rejected[:MOST_REJECTED]
        whys = "; ".join(
            f"{_count(kind.calls, 'call')}, the last {kind.method} from {kind.peer}: {kind.reason}" for kind in seen
        )
        left = len(facts.rejected) - len(seen)
        text = (
            f"{whys}{f'; and {left} further reasons' if left else ''}. These workers get no drafts, and what they "
            "finish is not stored. Give them a token that the server knows (docs/security.md), or add theirs to "
            "--tokens."
        )
        yield Hint("warn", "The server rejects callers", text)
    if facts.away:
        names = ", ".join(facts.away)
        text = "Its problems get no drafts until it is back; other problems do. Check its log and the network."
        yield Hint("bad", f"Not serving: {names}", text)


def _limits(facts: Facts) -> Iterator[Hint]:
    if not facts.streams and not facts.lookups_ever:
        text = (
            "No worker has connected yet. Where vLLM runs, set HISTOSPEC_ENDPOINT to this server's gRPC address and "
            "HISTOSPEC_NAMESPACE to the run's name, and start vLLM with the two HistoSpec options."
        )
        yield Hint("info", "Nothing is connected", text)
    yield from _capacity(facts.store_size)
    if facts.draft_p99 is not None and facts.draft_p99 > DEFAULT_DEADLINE:
        text = (
            f"One step in a hundred takes at least {1e3 * facts.draft_p99:,.0f} ms in the engine. By default, workers "
            f"wait {1e3 * DEFAULT_DEADLINE:.0f} ms. Use more cores and --threads, more shards, or a longer "
            "HISTOSPEC_DEADLINE for the workers."
        )
        yield Hint("warn", "Drafts come late", text)
    hits, misses = sum(n.hits for n in facts.namespaces), sum(n.misses for n in facts.namespaces)
    if (
        facts.evicted
        and facts.index_bytes >= FULL_SHARE * facts.memory
        and hits + misses >= A_FEW
        and misses >= MISSED_SHARE * (hits + misses)
    ):
        text = (
            f"The index is full: it evicted {_count(facts.evicted, 'response')} in the last ten minutes, and "
            f"{misses / (hits + misses):.0%} of the sessions found no history. Raise --memory, add shards, or keep "
            "fewer --history-epochs."
        )
        yield Hint("warn", "History is evicted", text)


def _capacity(size: StoreSize) -> Iterator[Hint]:
    """Yields hints about a store or disk that is nearly full."""
    if size.disk_free is not None and size.disk_size and size.disk_free < SCARCE_SHARE * size.disk_size:
        text = (
            f"{_gib(size.disk_free)} of {_gib(size.disk_size)} are free on the volume of --data-dir. When it is full, "
            "the server refuses ingests and commits, and still drafts. Free space, enlarge the volume, or keep fewer "
            "--history-epochs."
        )
        yield Hint("warn", "The disk is nearly full", text)
    if size.held is not None and size.limit and size.held > FULL_SHARE * size.limit:
        text = (
            f"The store holds {_gib(size.held)} of its limit of {_gib(size.limit)} (--disk, or the maxmemory of "
            "Redis). At the limit, the server refuses ingests and commits, and still drafts. Raise the limit, or keep "
            "fewer --history-epochs."
        )
        yield Hint("warn", "The store is nearly full", text)


def _about(mine: NamespaceFacts, facts: Facts) -> Iterator[Hint]:
    if mine.lookups >= A_FEW and mine.misnamed >= MISSED_SHARE * mine.lookups:
        text = (
            f"In the last ten minutes, {mine.misnamed:,.0f} of {_count(mine.lookups, 'session')} named a problem "
            "without history, while their prompts are known under other problem ids, or without one. If the ids are "
            "new in each step, as verl's uid is, leave the ids out: the prompt then identifies the problem. If several "
            "problems have the same prompt on purpose, this ends with the first pass over the data."
        )
        yield Hint("warn", f"{mine.name}: prompts are known under other ids", text)
    elif mine.lookups >= A_FEW and mine.hits < HARDLY_ANY * mine.lookups:
        yield _unknown_problems(mine, facts)
    if mine.lookups and mine.behind >= A_FEW:
        text = (
            f"The last {_count(mine.behind, 'response')} are of epoch {mine.behind_epoch} or older, and the newest "
            f"epoch is {mine.newest_epoch}. If the run continues from a checkpoint, call `rewind` with the epoch of "
            "the checkpoint: drafts then no longer come from responses of later epochs, and new responses count as new."
        )
        yield Hint("warn", f"{mine.name}: epochs have gone back", text)
    if mine.hits > mine.misses and mine.drafted >= ENOUGH_DRAFTED and mine.accepted < LOW_ACCEPTANCE * mine.drafted:
        if mine.same_weights:
            cause = (
                "most are of responses of the same epoch, so the same weights sample other text each time: the "
                "temperature is high. The server shortens drafts automatically. Coupled sampling (docs/coupled.md) "
                "makes a policy repeat itself. If the weights do change, give epochs."
            )
        else:
            cause = (
                "the policy has changed much since, or the temperature is high. The server shortens drafts "
                "automatically. Check that the responses come from this model, and try fewer --history-epochs."
            )
        text = f"Only {mine.accepted / mine.drafted:.0%} of the tokens drafted from history are accepted: {cause}"
        yield Hint("warn", f"{mine.name}: few draft tokens are accepted", text)
    if facts.streams and mine.verify_cost is not None and mine.verify_cost >= NOTHING_PAYS:
        text = (
            f"Workers report that verifying a draft token costs {mine.verify_cost:.2f} of a step without drafts: the "
            "GPU is saturated, so the server drafts nothing, and nothing is lost. Smaller batches leave room for "
            "drafts. If HISTOSPEC_VERIFY_COST is set by hand, try auto."
        )
        yield Hint("info", f"{mine.name}: verifying costs too much to draft", text)


def _unknown_problems(mine: NamespaceFacts, facts: Facts) -> Hint:
    """Returns a hint why sessions of a namespace find no history."""
    check = "check that namespace, tokenizer and chat template are as before, and that prompts contain no date or id"
    meant = _meant(mine, facts)
    if not mine.history_responses:
        if mine.newest_epoch:
            text = (
                f"Responses up to epoch {mine.newest_epoch} were stored, but the index holds none, so lookups find "
                f"nothing. They were evicted because memory was full, or dropped, or are not read yet.{meant}"
            )
            return Hint("warn", f"{mine.name}: no history", text)
        text = (
            "Nothing is stored yet, so lookups find nothing. Drafts come from running siblings, and from the history "
            f"once responses have finished.{meant}"
        )
        return Hint("info", f"{mine.name}: first epoch", text)
    if mine.hits_ever >= HARDLY_ANY * mine.lookups_ever:
        text = (
            f"In the last ten minutes, {1 - mine.hits / mine.lookups:.0%} of {_count(mine.lookups, 'session')} had an "
            f"unknown problem; before, prompts repeated. If the data set has not changed, {check}.{meant}"
        )
        return Hint("warn", f"{mine.name}: prompts no longer repeat", text)
    if mine.lookups_ever >= AN_EPOCH:
        text = (
            f"There is history, but almost none of {_count(mine.lookups_ever, 'session')} has a known problem. Unless "
            f"this is the first pass over a large data set, {check}. If prompts are truly unique, drafts can come only "
            f"from siblings and other problems.{meant}"
        )
        return Hint("warn", f"{mine.name}: prompts never repeat", text)
    if mine.newest_epoch:
        text = (
            f"{_count(mine.history_responses, 'response')} stored, the newest of epoch {mine.newest_epoch}, and almost "
            f"no prompt has repeated. This is normal in the first pass over a data set of more than "
            f"{_count(mine.lookups_ever, 'session')}. Otherwise, {check}.{meant}"
        )
        return Hint("info", f"{mine.name}: prompts have not repeated", text)
    text = (
        f"{_count(mine.history_responses, 'response')} stored, and almost no prompt has repeated yet. This is "
        f"normal until each prompt was seen once. If this is not the first epoch, {check}.{meant}"
    )
    return Hint("info", f"{mine.name}: probably the first epoch", text)


def _meant(mine: NamespaceFacts, facts: Facts) -> str:
    """Returns a question about the namespace that workers may have meant: one with a similar name, or an idle one."""
    others = {n.name: n for n in facts.namespaces if n.history_responses and n.name != mine.name}
    alike = look_alikes(mine.name, others, 1)
    if alike:
        other = others[alike[0]]
        return (
            f" Namespace {other.name}, which has {_count(other.history_responses, 'response')}, has a similar name: is "
            "HISTOSPEC_NAMESPACE right?"
        )
    idle = [name for name, other in others.items() if not other.lookups]
    if idle and not mine.history_responses:
        return f" No worker uses the history of {idle[0]}: is HISTOSPEC_NAMESPACE right?"
    return ""


def _count(number: float, what: str) -> str:
    return f"{number:,.0f} {what}{'' if number == 1 else 's'}"


def _gib(size: float) -> str:
    return f"{size / (1 << 30):,.1f} GiB"
