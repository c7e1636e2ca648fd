"""Checks of the facts about each shard: pure functions from facts to findings."""

from collections.abc import Iterator

from histospec.client.core.room import UNLIMITED, Room, ServerLimits
from histospec.client.doctor.facts import Facts, Failure
from histospec.client.doctor.findings import Finding, bad, ok, warn

CLOCK = 60.0
"""How many seconds two clocks may differ."""
SOME_LATE = 0.1
"""The share of steps that may miss the deadline."""
TOKEN = "set HISTOSPEC_TOKEN, or HISTOSPEC_TOKEN_FILE, to a token in the server's --tokens file"


def endpoint(facts: Facts) -> Iterator[Finding]:
    """Does a draft server answer at the address?"""
    for shard in facts.shards:
        name, address = shard.endpoint.name, shard.endpoint.address
        if shard.trouble is not None:
            yield bad("endpoint", f"{address}: {shard.trouble.text}", shard.trouble.advice, name)
        elif not shard.drafts:
            yield bad("endpoint", f"{address} speaks gRPC, but is no draft server", "check the port", name)
        elif shard.failure is not None and shard.failure.code not in ("UNAUTHENTICATED", "UNIMPLEMENTED"):
            text = f"{address} accepts connections, but does not answer: {_words(shard.failure)}"
            yield bad("endpoint", text, "read the server's log; it may be draining or overloaded", name)
        else:
            how = "over TLS" if facts.config.tls is not None else "in plain text"
            yield ok("endpoint", f"{address} answers {how}", name)


def shards(facts: Facts) -> Iterator[Finding]:
    """Does the client know all shards?"""
    if facts.others:
        names = ", ".join(f"{one.name} at {one.address}" for one in facts.others[:4])
        yield warn(
            "shards",
            f"the service has shards that HISTOSPEC_ENDPOINT does not list: {names}",
            "list the same shards for all workers, or discover them with discover://HOST:PORT",
        )


def token(facts: Facts) -> Iterator[Finding]:
    """May the client read and write in the namespace?"""
    given = facts.config.token is not None or facts.config.token_file is not None
    for shard in facts.shards:
        name = shard.endpoint.name
        if shard.failure is not None and shard.failure.code == "UNAUTHENTICATED":
            yield bad("token", f"the server refuses {'the token' if given else 'calls without a token'}", TOKEN, name)
        if shard.inspection is None:
            continue
        rights = shard.inspection.rights
        lost = [what for right, what in _LOST.items() if right not in rights]
        namespace = facts.config.namespace
        if not rights:
            text = f"the token is valid, but not for namespace {namespace!r}"
            advice = "correct HISTOSPEC_NAMESPACE, or add it to the token's `namespaces` in the server's --tokens file"
            yield bad("token", text, advice, name)
        elif lost:
            text = f"the token may only {' and '.join(rights)} in namespace {namespace!r}: {' and '.join(lost)}"
            yield bad("token", text, "add the right to the token's `rights` in the server's --tokens file", name)
        else:
            who = "the token" if given else "a client without a token"
            yield ok("token", f"{who} may {', '.join(rights)} in namespace {namespace!r}", name)


_LOST = {"read": "the worker gets no drafts", "write": "the server stores no responses"}
"""What happens without each right."""


def loading(facts: Facts) -> Iterator[Finding]:
    """Has the server loaded its store?"""
    for shard, told in facts.answering:
        if not told.loaded:
            text = "the server is still loading its store; until then it reports fewer responses than it has"
            advice = "wait until its log says `loaded`; sessions need not wait, because it loads their problems first"
            yield warn("loading", text, advice, shard.endpoint.name)


def store(facts: Facts) -> Iterator[Finding]:
    """Can the server store responses?"""
    for shard, told in facts.answering:
        if told.trouble:
            yield bad(
                "store", f"the server cannot store responses: {told.trouble}", "read its log", shard.endpoint.name
            )


def clock(facts: Facts) -> Iterator[Finding]:
    """Do the clocks agree?"""
    for shard, _ in facts.answering:
        off = abs(shard.ahead) - shard.doubt
        way = "ahead of" if shard.ahead > 0 else "behind"
        if off > CLOCK:
            yield warn(
                "clock",
                f"the server's clock is {_duration(off)} {way} this machine's",
                "set both by NTP; until then the times in logs differ, and certificates may seem expired",
                shard.endpoint.name,
            )
        else:
            yield ok("clock", "the server's clock agrees with this machine's", shard.endpoint.name)


def version(facts: Facts) -> Iterator[Finding]:
    """Have server and client the same version?"""
    for shard in facts.shards:
        name = shard.endpoint.name
        if shard.failure is not None and shard.failure.code == "UNIMPLEMENTED" and shard.drafts:
            text = f"the server is older than this client, {facts.version}: it does not know the call Inspect"
            yield warn("version", text, "install the same version on both sides", name)
        if shard.inspection is None:
            continue
        theirs = shard.inspection.version
        if theirs.split(".")[:2] != facts.version.split(".")[:2]:
            text = f"the server has {theirs}, this client {facts.version}"
            yield warn("version", text, "install the same version on both sides", name)
        else:
            yield ok("version", f"server {theirs}, client {facts.version}", name)


def limits(facts: Facts) -> Iterator[Finding]:
    """Do the server's limits allow what vLLM will ask for?"""
    wanted = facts.demand
    for shard, told in facts.answering:
        name = shard.endpoint.name
        drafts = told.limits.get("draft_tokens", UNLIMITED)
        server = ServerLimits(sessions=told.limits.get("sessions", UNLIMITED))
        running = Room.of(facts.config.limits, server).running
        if drafts < wanted.draft_tokens:
            text = f"the server drafts at most {drafts} tokens; "
            text += f"vLLM asks for {wanted.draft_tokens} (num_speculative_tokens)"
            yield warn("limits", text, "raise --max-draft-tokens of the server, or lower num_speculative_tokens", name)
        if running < wanted.sequences:
            text = f"the server takes {running} sequences of a worker; vLLM runs {wanted.sequences} (max_num_seqs)"
            yield warn("limits", text, "raise --max-sessions-per-stream of the server", name)
        if drafts >= wanted.draft_tokens and running >= wanted.sequences:
            text = f"the server takes {wanted.sequences} sequences and drafts {wanted.draft_tokens} tokens"
            yield ok("limits", text, name)


def step(facts: Facts) -> Iterator[Finding]:
    """Do drafts arrive within the deadline?"""
    deadline = facts.config.timeouts.step
    for shard in facts.shards:
        name, seconds = shard.endpoint.name, sorted(shard.steps)
        if shard.step_failure is not None:
            text = f"a step failed: {_words(shard.step_failure)}"
            yield bad("step", text, "read the server's log; it may be draining or overloaded", name)
        if not seconds:
            continue
        median, slowest = seconds[len(seconds) // 2], seconds[-1]
        late = sum(one > deadline for one in seconds)
        text = f"{len(seconds)} steps took {_ms(median)} at the median, {_ms(slowest)} at most; the deadline is"
        text += f" {_ms(deadline)}"
        if median > deadline:
            yield bad("step", f"{text}; drafts arrive too late", _NEARER, name)
        elif late > SOME_LATE * len(seconds):
            yield warn("step", f"{text}; {late} steps missed it", _NEARER, name)
        elif shard.step_failure is None:
            yield ok("step", text, name)


_NEARER = (
    "move the server nearer to the worker, give it more CPUs or more shards, or raise HISTOSPEC_DEADLINE "
    '(docs/troubleshooting.md, "Drafts are late")'
)


def _words(failure: Failure) -> str:
    return f"{failure.code}: {failure.details}" if failure.details else failure.code


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
