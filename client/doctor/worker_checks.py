"""Checks of the worker: the settings of the adapter, vLLM, and its model runner."""

import re
from collections.abc import Iterator

from histospec.client.doctor.facts import Facts
from histospec.client.doctor.findings import Finding, bad, ok, warn

OLDEST, NEWEST = (0, 22), (0, 32)
"""Versions of vLLM: the oldest with everything that the adapter needs, and the newest that its tests have run with."""


def adapter(facts: Facts) -> Iterator[Finding]:
    """Are the adapter's settings valid?"""
    if facts.adapter:
        yield bad("settings", facts.adapter, "correct the variable; vLLM does not start with it")


def vllm(facts: Facts) -> Iterator[Finding]:
    """Does the adapter know this vLLM?"""
    if facts.vllm is None:
        yield ok("vllm", "vLLM is not installed here; run `python -m histospec.client.doctor` also where it is")
        return
    number = tuple(map(int, re.findall(r"\d+", facts.vllm.version)[:2]))
    bounds = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if not number:
        yield warn("vllm", "vLLM is installed, but its version is unknown", f"the adapter needs a version {bounds}")
    elif number < OLDEST:
        yield bad("vllm", f"vLLM {facts.vllm.version} is older than the adapter needs", f"install a version {bounds}")
    elif number > NEWEST:
        text = f"vLLM {facts.vllm.version} is newer than the adapter was tested with"
        yield warn("vllm", text, f"if there are no drafts, install a version {bounds}")
    else:
        yield ok("vllm", f"vLLM {facts.vllm.version}")


def runner(facts: Facts) -> Iterator[Finding]:
    """Does vLLM use a model runner that accepts drafts from the scheduler?"""
    if facts.vllm is None:
        return
    if facts.vllm.runner not in (None, "", "0"):
        yield bad(
            "runner",
            f"VLLM_USE_V2_MODEL_RUNNER is {facts.vllm.runner!r}, but vLLM's model runner V2 accepts no drafts from "
            "the scheduler",
            "set it to 0",
        )
    elif facts.vllm.runner == "0":
        yield ok("runner", "vLLM uses its model runner V1, which accepts drafts from the scheduler")
    else:
        yield ok(
            "runner",
            "vLLM uses its model runner V1 with custom_class; with the model's own drafter, set "
            "VLLM_USE_V2_MODEL_RUNNER=0",
        )
