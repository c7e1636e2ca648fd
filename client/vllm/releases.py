"""The releases of vLLM that the adapter knows. `python -m scripts.vllm_versions` reads their sources.

A release is tested if the tests of tests/vllm run with it. It agrees if its sources have everything that the adapter
relies on (`needs.py`), and if every function whose body matters is as in a tested release, or was read.
docs/vllm-versions.md has the table. A test compares these lists with what the check recorded.
"""

import re
import sys

TESTED = ("0.27.0", "0.29.0", "0.32.0")
TESTED_WITH_V2 = ("0.33.0",)
"""Also among those that agree: tests ran with vLLM's model runner V2 only."""
AGREE = (
    "0.22.0", "0.22.1", "0.23.0", "0.24.0", "0.25.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.30.0", "0.31.0",
    "0.33.0",
)  # fmt: skip


def too_old(version: str) -> bool:
    """Returns whether a release, such as "0.21.0", is older than all that the adapter works with."""
    return _numbers(version) < min(map(_numbers, (*TESTED, *AGREE)))


def installed() -> str:
    """Returns the release of vLLM that this process has imported; empty: none."""
    return getattr(sys.modules.get("vllm"), "__version__", "")


def before(version: str, release: str) -> bool:
    """Returns whether a version, such as "0.31.0+cpu", is older than a release."""
    return _numbers(version) < _numbers(release)


def unknown(version: str) -> bool:
    """Returns whether a release was neither tested nor read. What follows a `+` does not count, as in "0.32.0+cpu"."""
    return _release(version) not in (*TESTED, *AGREE)


def doubt(version: str, runner: str = "") -> str:
    """Returns what is not known of a release, as a sentence; an empty text for a tested one.

    Args:
        version: such as "0.33.0+cpu".
        runner: vLLM's model runner, "V1" or "V2"; empty if it is not known.
    """
    release, tested = _release(version), f"tests ran with {', '.join(TESTED)}"
    if release in TESTED or (runner == "V2" and release in TESTED_WITH_V2):
        return ""
    if release in AGREE:
        return f"the sources of vLLM {release} have what HistoSpec relies on, but no test ran with it; {tested}"
    return (
        f"vLLM {release} was neither tested nor read; {tested}, and the sources of {', '.join(AGREE)} were read. "
        "If drafts are missing or an error names HistoSpec, use one of these"
    )


def _release(version: str) -> str:
    return version.partition("+")[0]


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", _release(version))[:2]]
