"""The checks: pure functions from facts to findings, about each shard, the namespace and the worker."""

import re
from collections.abc import Callable, Iterator

from histospec.client.core.message_limits import UNLIMITED, MessageLimits, ServerLimits
from histospec.client.doctor.facts import Facts, Failure
from histospec.client.doctor.findings import Finding, bad, counted, merged, ok, warn
from histospec.client.vllm import releases
from histospec.client.vllm.settings import PLUGIN

CLOCK = 60.0
"""How many seconds two clocks may differ."""
SOME_LATE = 0.1
"""The share of steps that may miss the deadline."""
ENOUGH = 64
"""If this many sessions found no history, that is no accident."""
A_FEW = 20
"""Sessions, or responses in a row: asynchronous workers may be late with as many."""
MISNAMED = 0.2
"""The share of sessions whose prompt is known under another problem id: in a first pass, a few may share a prompt."""
TOKEN = "set HISTOSPEC_TOKEN, or HISTOSPEC_TOKEN_FILE, to a token in the server's --tokens file"


# ---- each shard ---------------------------------------------------------------------------------------------------


def endpoint(facts: Facts) -> Iterator[Finding]:
    """Does a draft server answer at the address?"""
    for shard in facts.shards:
        name, address = shard.endpoint.name, shard.endpoint.address
        if shard.trouble is not None:
            yield bad("endpoint", f"{address}: {shard.trouble.text}", shard.trouble.advice, name)
        elif not shard.drafts:
            yield bad("endpoint", f"{address} speaks gRPC, but is no draft server", "check the port", name)
        elif shard.failure is not None and shard.failure.code != "UNAUTHENTICATED":
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
    for shard, inspection in facts.answering:
        if not inspection.loaded:
            text = "the server is still loading its store; until then it reports fewer responses than it has"
            advice = "wait until its log says `loaded`; sessions need not wait, because it loads their problems first"
            yield warn("loading", text, advice, shard.endpoint.name)


def store(facts: Facts) -> Iterator[Finding]:
    """Can the server store responses?"""
    for shard, inspection in facts.answering:
        if inspection.trouble:
            yield bad(
                "store", f"the server cannot store responses: {inspection.trouble}", "read its log", shard.endpoint.name
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
    for shard, inspection in facts.answering:
        name = shard.endpoint.name
        drafts = inspection.limits.get("draft_tokens", UNLIMITED)
        server = ServerLimits(sessions=inspection.limits.get("sessions", UNLIMITED))
        running = MessageLimits.of(facts.config.limits, server).running
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


# ---- the namespace, on all shards together --------------------------------------------------------------------------


def namespace(facts: Facts) -> Iterator[Finding]:
    """Does the namespace have responses, or is there another with a similar name?"""
    name = facts.config.namespace
    readable = [inspection for _, inspection in facts.answering if "read" in inspection.rights]
    if not readable:
        return
    there = [inspection.namespace for inspection in readable if inspection.namespace is not None]
    problems, responses = sum(one.problems for one in there), sum(one.responses for one in there)
    if responses:
        epoch = max(one.newest_epoch for one in there)
        stored = f"{counted(responses, 'response')} to {counted(problems, 'problem')}"
        yield ok("namespace", f"{name!r} has {stored}, the newest of epoch {epoch}")
        return
    similar = list(dict.fromkeys(other for inspection in readable for other in inspection.similar))
    if similar:
        names = " and ".join(map(repr, similar[:3]))
        yield warn(
            "namespace",
            f"{name!r} has no responses, but {names} exist{'s' if len(similar[:3]) == 1 else ''}",
            "use one HISTOSPEC_NAMESPACE for the workers and the trainer of a run; ignore this if the run is new",
        )
    else:
        yield ok("namespace", f"{name!r} has no responses yet")


def lookups(facts: Facts) -> Iterator[Finding]:
    """Do prompts repeat?"""
    there = [inspection.namespace for _, inspection in facts.answering if inspection.namespace is not None]
    hit, miss = sum(one.lookups_hit for one in there), sum(one.lookups_miss for one in there)
    misnamed = sum(one.misnamed_lookups for one in there)
    if hit + miss >= A_FEW and misnamed >= MISNAMED * (hit + miss):
        yield warn(
            "lookups",
            f"{misnamed} of {hit + miss} sessions named a problem without responses, while their prompts are known "
            "under other problem ids, or without one",
            "leave the problem ids out if they are new in each step (such as verl's uid): the prompt then identifies "
            'the problem (docs/troubleshooting.md, "vLLM is no faster")',
        )
    elif hit == 0 and miss >= ENOUGH and any(one.newest_epoch > 0 for one in there):
        yield warn(
            "lookups",
            f"none of {miss} sessions was opened on a prompt that has responses",
            "the tokens of a prompt must be the same in each epoch: look for a date, a random number, another chat "
            'template or tokenizer; or give explicit problem ids (docs/troubleshooting.md, "vLLM is no faster")',
        )


def epochs(facts: Facts) -> Iterator[Finding]:
    """Do the epochs go on from the newest one?"""
    there = [inspection.namespace for _, inspection in facts.answering if inspection.namespace is not None]
    behind = sum(one.behind for one in there)
    if behind >= A_FEW:
        yield warn(
            "epochs",
            f"the last {counted(behind, 'response')} are of epoch {max(one.behind_epoch for one in there)} or older, "
            f"and the newest epoch is {max(one.newest_epoch for one in there)}",
            "if the run continues from a checkpoint, call rewind with the checkpoint's epoch",
        )


def prompts(facts: Facts) -> Iterator[Finding]:
    """Does another namespace have responses to the same prompts?"""
    hit = any(
        inspection.namespace is not None and inspection.namespace.lookups_hit for _, inspection in facts.answering
    )
    known: dict[str, int] = {}
    asked = 0
    for _, inspection in facts.answering:
        asked += max((shared.asked for shared in inspection.shared), default=0)
        for shared in inspection.shared:
            known[shared.namespace] = known.get(shared.namespace, 0) + shared.prompts
    if not known:
        return
    other, number = max(known.items(), key=lambda one: (one[1], one[0]))
    text = f"{number} of its {asked} newest prompts also have responses in {other!r}"
    if hit:  # probably an earlier run on the same problems
        yield ok("prompts", text)
    else:
        yield warn(
            "prompts",
            f"{text}, and no session of this namespace has found history",
            "use one namespace for all workers and all epochs of a run, and another one for another run",
        )


# ---- the worker -----------------------------------------------------------------------------------------------------


def adapter(facts: Facts) -> Iterator[Finding]:
    """Are the adapter's settings valid?"""
    if facts.adapter:
        yield bad("settings", facts.adapter, "correct the variable; vLLM does not start with it")


def vllm(facts: Facts) -> Iterator[Finding]:
    """Does the adapter know this vLLM?"""
    if facts.vllm is None:
        yield ok("vllm", "vLLM is not installed here; run `python -m histospec.client.doctor` also where it is")
        return
    version = facts.vllm.version
    advice = f"tested are {', '.join(releases.TESTED)}; docs/vllm-versions.md has the others"
    if not re.match(r"\d+\.\d+", version):
        yield warn("vllm", "vLLM is installed, but its version is unknown", advice)
    elif releases.too_old(version):
        yield bad("vllm", f"vLLM {version} is older than the adapter needs", advice)
    elif releases.unknown(version):
        yield warn("vllm", f"vLLM {version} was neither tested with the adapter nor read", advice)
    elif releases.doubt(version):
        yield ok("vllm", f"vLLM {version}: its sources have what the adapter relies on; no test ran with it")
    else:
        yield ok("vllm", f"vLLM {version}")


def runner(facts: Facts) -> Iterator[Finding]:
    """Which of vLLM's model runners does vLLM use, and does it have what the settings need?"""
    if facts.vllm is None:
        return
    if facts.vllm.runner in (None, ""):
        yield ok(
            "runner", "vLLM chooses its model runner; with the model's own drafter, set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    elif facts.vllm.runner == "0":
        yield ok("runner", "vLLM uses its model runner V1")
    else:
        yield ok("runner", "vLLM uses its model runner V2, which verifies the server's drafts or the model's, not both")


def plugin(facts: Facts) -> Iterator[Finding]:
    """Does vLLM load the plug-in? It cannot say so itself if vLLM does not."""
    if facts.vllm is None or facts.vllm.plugins is None:
        return
    if PLUGIN not in facts.vllm.plugins.split(","):
        yield bad(
            "plugin",
            f"VLLM_PLUGINS is {facts.vllm.plugins!r}, without {PLUGIN!r}, which prepares vLLM's workers and does what "
            "HISTOSPEC_ENABLE says",
            f"add {PLUGIN} to the list, or unset the variable",
        )


# ---- all of them ----------------------------------------------------------------------------------------------------


CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    endpoint,
    shards,
    token,
    version,
    loading,
    store,
    namespace,
    lookups,
    epochs,
    prompts,
    limits,
    step,
    clock,
    adapter,
    vllm,
    plugin,
    runner,
)
"""In the order of their dependencies: later checks need what earlier ones test."""


def examine(facts: Facts) -> list[Finding]:
    """Runs all  Returns their findings in order."""
    return merged((finding for check in CHECKS for finding in check(facts)), len(facts.shards))
