"""Every change that HistoSpec makes to vLLM at run time. PATCHES lists all of them; a test compares it with vLLM.

HistoSpec needs no fork and changes no file of vLLM. It uses vLLM's own settings (`speculative_config`, `scheduler_cls`,
the entry point `vllm.general_plugins`), and extends vLLM's scheduler in a subclass (`interface.py`). Beyond that, it
replaces the functions in PATCHES in memory, in the processes that load its plug-in or scheduler. No other folder
assigns to anything of vLLM's.

With coupled sampling the plug-in also sets VLLM_USE_V2_MODEL_RUNNER=0, unless the environment sets it, because the
second model runner has another sampler. Each of vLLM's model runners then carries one more attribute,
`_histospec_texts`, and the scheduler gives a seed to the sampling parameters of requests that have none.
"""

from typing import NamedTuple


class Patch(NamedTuple):
    """One function of vLLM that HistoSpec replaces.

    Attributes:
        symbol: `module:qualified name` in vLLM.
        room: the module of this package that replaces it.
        installed_by: who calls that module's `install`, and under which condition.
        versions: where vLLM has the symbol in the form that is known, and what happens elsewhere.
        why: what is wrong or missing without the replacement.
        until: when the replacement can go.
    """

    symbol: str
    room: str
    installed_by: str
    versions: str
    why: str
    until: str


PATCHES = (
    Patch(
        symbol="vllm.v1.worker.worker_base:WorkerBase.__init__",
        room="workers",
        installed_by="the plug-in",
        versions="run with 0.27 and 0.32",
        why="tells in a worker whether its engine drafts with HistoSpec; the three patches after this one need to know",
        until="vLLM tells its plug-ins the configuration",
    ),
    Patch(
        symbol="vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
        room="cpu",
        installed_by="WorkerBase.__init__, on the CPU platform, unless HISTOSPEC_VLLM_CPU_FIX=0",
        versions="run with 0.27 and 0.32; a vLLM without the function is left alone, with a warning",
        why="vLLM's CPU build returns uninitialised memory, so sampling with any speculation is wrong (issue 55005)",
        until="the long test in tests/vllm/test_sampling.py fails that expects vLLM's own function to be wrong",
    ),
    Patch(
        symbol="vllm.v1.sample.rejection_sampler:RejectionSampler.forward",
        room="undrafted",
        installed_by="WorkerBase.__init__",
        versions="run with 0.27 and 0.32; another signature is left alone, with a line in the log",
        why="a step without drafts costs 1 to 3 % more than one without speculation",
        until="vLLM takes the short way itself where nothing was drafted",
    ),
    Patch(
        symbol="vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids",
        room="drafter",
        installed_by="WorkerBase.__init__, with a drafter of the model's own",
        versions="0.24 and later, run with 0.27 and 0.32; elsewhere that drafter drafts in every step",
        why="a drafter that is asked for no tokens makes its first pass all the same, where history drafts for all",
        until="vLLM leaves the drafter out when a step asks for no tokens",
    ),
    Patch(
        symbol="vllm.v1.engine.core:EngineCore.set_weight_version",
        room="weight_versions",
        installed_by="HistoSpecScheduler",
        versions="0.27 and later, run with 0.27 and 0.32; older ones have no weight versions and are left alone",
        why="vLLM tells the version of the weights to its engine core alone, not to the scheduler",
        until="vLLM tells its scheduler",
    ),
    Patch(
        symbol="vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",
        room="sampling",
        installed_by="the plug-in, with HISTOSPEC_SAMPLING=coupled",
        versions="run with 0.27 and 0.32; another signature is refused at the start",
        why="the samplers below it do not know which requests and texts the rows of a batch are",
        until="vLLM lets a sampler of the user's own see the batch while it verifies drafts",
    ),
    Patch(
        symbol="vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward",
        room="sampling",
        installed_by="the plug-in, with HISTOSPEC_SAMPLING=coupled; in each sampler, at its first seeded batch",
        versions="run with 0.27 and 0.32; another signature is refused at the first seeded batch",
        why="draws the token behind the drafts, and all tokens where there are no drafts, from vLLM's own generator",
        until="as for GPUModelRunner._sample",
    ),
    Patch(
        symbol="vllm.v1.sample.rejection_sampler:rejection_sample",
        room="sampling",
        installed_by="the plug-in, with HISTOSPEC_SAMPLING=coupled",
        versions="run with 0.27 and 0.32; another signature is refused at the start",
        why="accepts a drafted token with its probability, where coupled sampling accepts it if it is the drawn one",
        until="as for GPUModelRunner._sample",
    ),
)
