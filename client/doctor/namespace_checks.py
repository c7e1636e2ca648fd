"""Checks of what all shards together hold of the namespace."""

from collections.abc import Iterator

from histospec.client.doctor.facts import Facts
from histospec.client.doctor.findings import Finding, counted, ok, warn

ENOUGH = 64
"""If this many sessions found no history, that is no accident."""


def namespace(facts: Facts) -> Iterator[Finding]:
    """Does the namespace have responses, or is there another with a similar name?"""
    name = facts.config.namespace
    readable = [told for _, told in facts.answering if "read" in told.rights]
    if not readable:
        return
    there = [told.namespace for told in readable if told.namespace is not None]
    problems, responses = sum(one.problems for one in there), sum(one.responses for one in there)
    if responses:
        epoch = max(one.newest_epoch for one in there)
        held = f"{counted(responses, 'response')} to {counted(problems, 'problem')}"
        yield ok("namespace", f"{name!r} has {held}, the newest of epoch {epoch}")
        return
    similar = list(dict.fromkeys(other for told in readable for other in told.similar))
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
    there = [told.namespace for _, told in facts.answering if told.namespace is not None]
    hit, miss = sum(one.lookups_hit for one in there), sum(one.lookups_miss for one in there)
    if hit == 0 and miss >= ENOUGH and any(one.newest_epoch > 0 for one in there):
        yield warn(
            "lookups",
            f"none of {miss} sessions was opened on a prompt that has responses",
            "the tokens of a prompt must be the same in each epoch: look for a date, a random number, another chat "
            'template or tokenizer; or give explicit problem ids (docs/troubleshooting.md, "vLLM is no faster")',
        )


def prompts(facts: Facts) -> Iterator[Finding]:
    """Does another namespace have responses to the same prompts?"""
    hit = any(told.namespace is not None and told.namespace.lookups_hit for _, told in facts.answering)
    known: dict[str, int] = {}
    asked = 0
    for _, told in facts.answering:
        asked += max((shared.asked for shared in told.shared), default=0)
        for shared in told.shared:
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
