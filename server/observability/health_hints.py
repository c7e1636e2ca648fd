"""What the numbers of a server mean, in plain language, and what to do: a pure function from numbers to sentences."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from histospec.protocol.costs import DEFAULT_DEADLINE, NOTHING_PAYS
from histospec.server.history.namespaces import look_alikes
from histospec.server.stores.interface import StoreSize

FULL_SHARE = 0.9  # of the memory budget, of the limit of the store
SCARCE_SHARE = 0.1  # of the disk
MISSED_SHARE = 0.2  # of the lookups
HARDLY_ANY = 0.05  # of the lookups
LOW_ACCEPTANCE = 0.2  # of the drafted tokens
A_FEW = 20  # lookups, below which nothing is concluded
AN_EPOCH = 10_000  # lookups without a hit that a first epoch hardly explains any more
ENOUGH_DRAFTED = 1_000  # tokens

Level = Literal["bad", "warn", "info"]


class Hint(NamedTuple):
    """One thing to know."""

    level: Level
    """bad: something is broken. warn: drafts are lost. info: good to know, and often nothing to do."""
    title: str
    text: str
    """Why it is so, and what to do."""


class NamespaceFacts(NamedTuple):
    """One namespace, lately."""

    name: str
    hits: float = 0
    misses: float = 0
    newest_epoch: int = 0
    history_responses: float = 0
    hits_ever: float = 0
    """Since the start."""
    lookups_ever: float = 0
    drafted: float = 0
    """Tokens, from the history."""
    accepted: float = 0
    """Of these."""
    verify_cost: float | None = None

    @property
    def lookups(self) -> float:
        """Sessions opened."""
        return self.hits + self.misses


class Facts(NamedTuple):
    """The numbers that hints come from; counters are of the last minutes."""

    waiting: Mapping[str, str] = {}
    """Parts that are not ready, with what each waits for."""
    streams: float = 0
    lookups_ever: float = 0
    evicted: float = 0
    """Responses, for want of memory."""
    index_bytes: float = 0
    memory: float = 1
    """The budget, in bytes."""
    store_errors: float = 0
    unreadable: Mapping[str, str] = {}
    """What cannot be read from its file as that is now, and why."""
    store_trouble: str = ""
    """Why nothing can be stored until a person acts."""
    damaged: float = 0
    """Stored responses that were left out since the start."""
    retention_paused: str = ""
    """Why retention waits for a person."""
    store_size: StoreSize = StoreSize()
    draft_p99: float | None = None
    """Seconds."""
    away: Sequence[str] = ()
    """Names of shards that do not serve."""
    namespaces: Sequence[NamespaceFacts] = ()


def hints(facts: Facts) -> list[Hint]:
    """What somebody should know, the worst first."""
    found = [*_faults(facts), *_limits(facts)]
    for namespace in facts.namespaces:
        found += _about(namespace, facts)
    order: list[Level] = ["bad", "warn", "info"]
    return sorted(found, key=lambda hint: order.index(hint.level))


def _faults(facts: Facts) -> list[Hint]:
    found = []
    if "drain" in facts.waiting:
        found.append(
            Hint("info", "This shard is draining", "It takes nothing new and stops when the open streams have ended.")
        )
    elif facts.waiting:
        why = "; ".join(f"{part}: {reason}" for part, reason in facts.waiting.items())
        text = (
            f"The shard drafts from running sessions, and tells callers that store or read to come back ({why}). "
            "Wait until it is ready."
        )
        found.append(Hint("info", "The store is not open yet", text))
    if facts.store_trouble:
        text = (
            f"{facts.store_trouble}. Nothing is acknowledged, and workers keep what they finish; see "
            "HistoSpecStoreUnusable in docs/runbooks.md."
        )
        found.append(Hint("bad", "Nothing can be stored", text))
    if facts.damaged:
        text = (
            f"{_count(facts.damaged, 'stored response')} or more could not be read, or were not what was written, "
            "and are left out. The log says which file was set aside. Check the disk and the memory of this "
            "machine, and see HistoSpecStoreDamaged in docs/runbooks.md."
        )
        found.append(Hint("bad", "The store was damaged", text))
    if facts.retention_paused:
        text = (
            f"{facts.retention_paused[0].upper()}{facts.retention_paused[1:]}. Nothing is forgotten meanwhile. Check "
            "the clock; then `histospec forget --older-than DAYS` forgets what is old, and retention goes on."
        )
        found.append(Hint("warn", "Retention is paused", text))
    if facts.store_errors:
        text = (
            f"{_count(facts.store_errors, 'request')} failed lately. Drafting goes on from the index, but these "
            "responses are not kept: look at the recent errors below, then at the disk or at Redis."
        )
        found.append(Hint("bad", "The store fails", text))
    for name, why in facts.unreadable.items():
        text = (
            f"{why}. What their files held before is in force: what was taken back still works, and what is new "
            "does not work yet. Mend the files or their permissions; the server reads them again within seconds."
        )
        found.append(Hint("bad", f"The {name} cannot be read", text))
    if facts.away:
        names = ", ".join(facts.away)
        text = (
            "Its problems get no drafts until it is back; everything else goes on. Look at its log, and at the network."
        )
        found.append(Hint("bad", f"Not serving: {names}", text))
    return found


def _limits(facts: Facts) -> list[Hint]:
    found = []
    if not facts.streams and not facts.lookups_ever:
        text = (
            "No worker has connected yet. Set HISTOSPEC_ENDPOINT to this server's gRPC address and HISTOSPEC_NAMESPACE "
            "to the run's name where vLLM runs, and start it with the two HistoSpec options."
        )
        found.append(Hint("info", "Nothing is connected", text))
    found += _room(facts.store_size)
    if facts.draft_p99 is not None and facts.draft_p99 > DEFAULT_DEADLINE:
        text = (
            f"One step in a hundred takes {1e3 * facts.draft_p99:,.0f} ms or more in the engine, and workers wait "
            f"{1e3 * DEFAULT_DEADLINE:.0f} ms unless told otherwise. Give it cores and --threads, more shards, or the "
            "workers a longer HISTOSPEC_DEADLINE."
        )
        found.append(Hint("warn", "Drafts come late", text))
    hits, misses = sum(n.hits for n in facts.namespaces), sum(n.misses for n in facts.namespaces)
    if (
        facts.evicted
        and facts.index_bytes >= FULL_SHARE * facts.memory
        and hits + misses >= A_FEW
        and misses >= MISSED_SHARE * (hits + misses)
    ):
        text = (
            f"The index is full, {_count(facts.evicted, 'response')} left it lately for want of memory, and "
            f"{misses / (hits + misses):.0%} of the sessions found no history. Raise --memory, add shards, or keep "
            "fewer --history-epochs."
        )
        found.append(Hint("warn", "History is evicted", text))
    return found


def _room(size: StoreSize) -> list[Hint]:
    """Whether writes will fail soon."""
    found = []
    if size.disk_free is not None and size.disk_size and size.disk_free < SCARCE_SHARE * size.disk_size:
        text = (
            f"{_gib(size.disk_free)} of {_gib(size.disk_size)} are free on the volume of --data-dir. When it is full, "
            "ingests and commits are refused, and drafting goes on. Make room, enlarge the volume, or keep fewer "
            "--history-epochs."
        )
        found.append(Hint("warn", "The disk fills up", text))
    if size.held is not None and size.limit and size.held > FULL_SHARE * size.limit:
        text = (
            f"The store holds {_gib(size.held)} of the {_gib(size.limit)} that it may (--disk, or the maxmemory of "
            "Redis). At the limit, ingests and commits are refused, and drafting goes on. Raise the limit, or keep "
            "fewer --history-epochs."
        )
        found.append(Hint("warn", "The store fills up", text))
    return found


def _about(mine: NamespaceFacts, facts: Facts) -> list[Hint]:
    found = []
    if mine.lookups >= A_FEW and mine.hits < HARDLY_ANY * mine.lookups:
        found.append(_unknown_problems(mine, facts))
    if mine.hits > mine.misses and mine.drafted >= ENOUGH_DRAFTED and mine.accepted < LOW_ACCEPTANCE * mine.drafted:
        text = (
            f"Problems are known, but only {mine.accepted / mine.drafted:.0%} of what history drafts is accepted: the "
            "policy has changed much since, or the temperature is high. Drafts become shorter by themselves; check "
            "that the responses are those of this model, and try fewer --history-epochs."
        )
        found.append(Hint("warn", f"{mine.name}: few drafted tokens are accepted", text))
    if facts.streams and mine.verify_cost is not None and mine.verify_cost >= NOTHING_PAYS:
        text = (
            f"Workers say that verifying a drafted token costs {mine.verify_cost:.2f} of a plain step: the GPU is "
            "saturated, so nothing is drafted, and nothing is lost. Smaller batches leave room for drafts; where "
            "HISTOSPEC_VERIFY_COST is set by hand, try auto."
        )
        found.append(Hint("info", f"{mine.name}: verifying costs too much to draft", text))
    return found


def _unknown_problems(mine: NamespaceFacts, facts: Facts) -> Hint:
    """Why sessions of a namespace find no history."""
    check = "check that namespace, tokenizer and chat template are those of before, and that prompts hold no date or id"
    meant = _meant(mine, facts)
    if not mine.history_responses:
        if mine.newest_epoch:
            text = (
                f"Responses up to epoch {mine.newest_epoch} were stored, but the index holds none, so there is nothing "
                f"to look up. They were evicted for want of memory, or dropped, or wait to be read.{meant}"
            )
            return Hint("warn", f"{mine.name}: no history", text)
        text = (
            "Nothing is stored yet, so there is nothing to look up. Drafts come from running siblings, and from the "
            f"history once responses have finished.{meant}"
        )
        return Hint("info", f"{mine.name}: first epoch", text)
    if mine.hits_ever >= HARDLY_ANY * mine.lookups_ever:
        text = (
            f"Lately {1 - mine.hits / mine.lookups:.0%} of {_count(mine.lookups, 'session')} belong to no known "
            f"problem; before, prompts came back. If the data set has not changed, {check}.{meant}"
        )
        return Hint("warn", f"{mine.name}: prompts no longer repeat", text)
    if mine.lookups_ever >= AN_EPOCH:
        text = (
            f"There is history, but hardly one of {_count(mine.lookups_ever, 'session')} belongs to it. Unless this is "
            f"still the first pass over a large data set, {check}. Where prompts are truly unique, only siblings and "
            f"other problems can draft.{meant}"
        )
        return Hint("warn", f"{mine.name}: prompts never repeat", text)
    if mine.newest_epoch:
        text = (
            f"{_count(mine.history_responses, 'response')} stored, the newest of epoch {mine.newest_epoch}, and hardly "
            f"a prompt has come back. That is normal in the first pass over a data set of more than "
            f"{_count(mine.lookups_ever, 'session')}. Otherwise {check}.{meant}"
        )
        return Hint("info", f"{mine.name}: prompts have not come back", text)
    text = (
        f"{_count(mine.history_responses, 'response')} stored, and hardly a prompt has come back yet. That is "
        f"normal until each was seen once. If this is not the first epoch, {check}.{meant}"
    )
    return Hint("info", f"{mine.name}: first epoch, it seems", text)


def _meant(mine: NamespaceFacts, facts: Facts) -> str:
    """A question about another namespace that the workers may have meant: one with a similar name, or an idle one."""
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
        return f" Nobody asks for the history of {idle[0]}: is HISTOSPEC_NAMESPACE right?"
    return ""


def _count(number: float, what: str) -> str:
    return f"{number:,.0f} {what}{'' if number == 1 else 's'}"


def _gib(size: float) -> str:
    return f"{size / (1 << 30):,.1f} GiB"
