"""Checks of the worker: the settings of the adapter, vLLM, and its model runner."""

import re
from collections.abc import Iterator

from histospec.client.doctor.facts import Facts
from histospec.client.doctor.findings import Finding, bad, ok, warn
from histospec.client.vllm import releases


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
