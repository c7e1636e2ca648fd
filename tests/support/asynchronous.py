"""Lets vLLM schedule asynchronously on a CPU, for which its platform turns that off."""

import functools
from typing import Any


def keep_as_set() -> None:
    """Leaves `async_scheduling` as the user has set it, for the engines that this process starts from now on."""
    from vllm.platforms.cpu import CpuPlatform

    check: Any = CpuPlatform.check_and_update_config
    if hasattr(check, "__wrapped__"):
        return

    @functools.wraps(check.__func__)
    def keeping(cls: Any, vllm_config: Any) -> None:
        scheduling = vllm_config.scheduler_config
        asked = scheduling.async_scheduling
        check.__func__(cls, vllm_config)
        scheduling.async_scheduling = asked

    CpuPlatform.check_and_update_config = classmethod(keeping)
