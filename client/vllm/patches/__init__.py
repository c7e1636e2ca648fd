"""Every change that HistoSpec makes to vLLM at run time. PATCHES lists all of them; a test compares it with vLLM.

HistoSpec needs no fork and changes no file of vLLM. It uses vLLM's own settings (`speculative_config`, `scheduler_cls`,
the entry point `vllm.general_plugins`) and extends vLLM's scheduler in a subclass (`interface.py`). Beyond that, it
replaces the functions in PATCHES in memory, in the processes that load its plug-in or scheduler. No other package of
HistoSpec assigns to attributes of vLLM.

With HISTOSPEC_ENABLE=1 the plug-in sets attributes of vLLM's EngineArgs (`enabling.py`). With coupled sampling it sets
VLLM_USE_V2_MODEL_RUNNER=0, unless the environment sets it, because V2 gives the server no alternatives. Each of
vLLM's model runners V1 then has one more attribute, `_histospec_texts`, and each output of its steps
`_histospec_alternatives`. Under asynchronous scheduling, each message to the workers has `_histospec_order`, and each
output `_histospec_outcome`. The scheduler adds a seed to the sampling parameters of requests without one.
"""

from typing import NamedTuple

from histospec.client.vllm.needs import FIRST_V2


class Patch(NamedTuple):
    """One function of vLLM that HistoSpec replaces.

    Attributes:
        symbol: `module:qualified name` in vLLM.
        room: the module of this package that replaces it.
        installed_by: the caller of that module's `install`, and its condition.
        versions: the versions of vLLM that have the symbol in the known form, and what happens with others.
        why: what is wrong or missing without the replacement.
        until: when the replacement can be removed.
        since: the first release in which the function is replaced; empty: all.
    """

    symbol: str
    room: str
    installed_by: str
    versions: str
    why: str
    until: str
    since: str = ""


PATCHES = (
    Patch(
        symbol="vllm.engine.arg_utils:EngineArgs.create_speculative_config",
        room="enabling",
        installed_by="the plug-in, with HISTOSPEC_ENABLE=1",
        versions="run with 0.27 and 0.32; another signature is refused at the start",
        why="vLLM takes these settings from the program that starts it alone, and trainers pass on what they know",
        until="vLLM reads speculative_config and scheduler_cls from its environment, too",
    ),
    Patch(
        symbol="vllm.config.vllm:VllmConfig._get_v2_model_runner_unsupported_features",
        room="choosing",
        installed_by="the plug-in",
        versions="run with 0.32 and 0.33; older ones keep V1",
        why="vLLM chooses V1, which it will remove, for every speculative method of a class that it does not know",
        until="vLLM's model runner V2 takes drafts from the scheduler, or classes that draft",
        since=FIRST_V2,
    ),
    Patch(
        symbol="vllm.config.vllm:VllmConfig.__post_init__",
        room="choosing",
        installed_by="the plug-in",
        versions="run with 0.32 and 0.33",
        why="vLLM turns asynchronous scheduling on by default with V2; 0.32 refuses it if the user does",
        until="the adapter drafts under asynchronous scheduling by default, and vLLM admits it",
        since=FIRST_V2,
    ),
    Patch(
        symbol="vllm.v1.worker.worker_base:WorkerBase.__init__",
        room="plugin",
        installed_by="the plug-in",
        versions="run with 0.27, 0.29 and 0.32",
        why="a plug-in cannot see whether the engine drafts with HistoSpec; the next three patches depend on it",
        until="vLLM passes its configuration to plug-ins",
    ),
    Patch(
        symbol="vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
        room="cpu",
        installed_by="WorkerBase.__init__, on the CPU platform, unless HISTOSPEC_VLLM_CPU_FIX=0",
        versions="run with 0.27, 0.29 and 0.32; without the function nothing is replaced, with a warning",
        why="vLLM's CPU build returns uninitialised memory, so sampling with any speculation is wrong (issue 55005)",
        until="vLLM's own function is right; then a long test in tests/vllm/test_sampling.py fails",
    ),
    Patch(
        symbol="vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs",
        room="undrafted",
        installed_by="WorkerBase.__init__",
        versions="0.32 and later, run with 0.32; in older ones it changes nothing; another signature is kept",
        why="a step without drafts costs 5 % more than one without speculation",
        until="vLLM prepares such a step as without speculation; models with recurrent layers keep vLLM's way",
    ),
    Patch(
        symbol="vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids",
        room="drafter",
        installed_by="WorkerBase.__init__, with the model's own drafter",
        versions="0.24 and later, run with 0.27, 0.29 and 0.32; with older ones that drafter drafts in every step",
        why="vLLM makes the drafter's first pass even if the step asks it for no tokens",
        until="vLLM skips the drafter if a step asks it for no tokens",
    ),
    Patch(
        symbol="vllm.v1.worker.gpu.model_runner:init_speculator",
        room="runner_v2",
        installed_by="WorkerBase.__init__, with model runner V2",
        versions="run with 0.32 and 0.33",
        why="V2 knows no speculative method of the class `custom_class`",
        until="vLLM makes speculators of classes that the user names",
        since=FIRST_V2,
    ),
    Patch(
        symbol="vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model",
        room="runner_v2",
        installed_by="WorkerBase.__init__, with model runner V2",
        versions="run with 0.32 and 0.33",
        why="places that no draft fills are removed from a step, which the scheduler may hold, too: it changes a copy",
        until="V2 verifies as many tokens as a speculator has drafted",
        since=FIRST_V2,
    ),
    Patch(
        symbol="vllm.v1.worker.gpu.model_runner:GPUModelRunner.update_requests",
        room="runner_v2",
        installed_by="WorkerBase.__init__, with model runner V2",
        versions="run with 0.32 and 0.33",
        why="V2 takes the number of drafted tokens from the scheduler, but not the tokens",
        until="V2 copies the scheduler's drafts to the device, and asks speculators for drafts at the start of a step",
        since=FIRST_V2,
    ),
    Patch(
        symbol="vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens",
        room="runner_v2",
        installed_by="WorkerBase.__init__, with model runner V2",
        versions="run with 0.32 and 0.33",
        why="a speculator does not get the host's copies of the sampled tokens, which vLLM has begun",
        until="vLLM passes them to speculators",
        since=FIRST_V2,
    ),
    Patch(
        symbol="vllm.v1.worker.gpu.model_runner:GPUModelRunner.take_draft_token_ids",
        room="runner_v2",
        installed_by="WorkerBase.__init__, with model runner V2",
        versions="run with 0.32 and 0.33",
        why="V2 returns placeholders, -1, which the scheduler would have verified where no draft arrives",
        until="V2 returns no drafts if its speculator has none",
        since=FIRST_V2,
    ),
    Patch(
        symbol="vllm.v1.worker.gpu.spec_decode.rejection_sampler:rejection_sample",
        room="sampling_v2",
        installed_by="WorkerBase.__init__, with model runner V2 and HISTOSPEC_SAMPLING=coupled",
        versions="run with 0.32 and 0.33; another signature is refused at the start",
        why="it accepts a drafted token with a probability; coupled sampling accepts it if it equals the sampled token",
        until="vLLM verifies drafts by sampling, if the user asks for it",
        since=FIRST_V2,
    ),
    Patch(
        symbol="vllm.v1.engine.core:EngineCore.set_weight_version",
        room="weight_versions",
        installed_by="HistoSpecScheduler",
        versions="0.27 and later, run with 0.27, 0.29 and 0.32; older ones have no weight versions",
        why="vLLM passes the version of the weights to its engine core only, not to the scheduler",
        until="vLLM passes it to its scheduler",
    ),
    Patch(
        symbol="vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",
        room="sampling",
        installed_by="the plug-in, with HISTOSPEC_SAMPLING=coupled",
        versions="run with 0.27, 0.29 and 0.32; another signature is refused at the start",
        why="the samplers that it calls do not get the requests and texts of the batch's rows",
        until="vLLM passes the batch to custom samplers, also when it verifies drafts",
    ),
    Patch(
        symbol="vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward",
        room="sampling",
        installed_by="the plug-in, with HISTOSPEC_SAMPLING=coupled; in each sampler, at its first seeded batch",
        versions="run with 0.27, 0.29 and 0.32; another signature is refused at the first seeded batch",
        why="it draws the token after a draft, and all tokens without drafts, with vLLM's own random numbers",
        until="as for GPUModelRunner._sample",
    ),
    Patch(
        symbol="vllm.v1.sample.rejection_sampler:rejection_sample",
        room="sampling",
        installed_by="the plug-in, with HISTOSPEC_SAMPLING=coupled",
        versions="run with 0.27, 0.29 and 0.32; another signature is refused at the start",
        why="it accepts a drafted token with a probability; coupled sampling accepts it if it equals the drawn token",
        until="as for GPUModelRunner._sample",
    ),
    Patch(
        symbol="vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens",
        room="sampling",
        installed_by="the plug-in, with HISTOSPEC_SAMPLING=coupled",
        versions="run with 0.32; another signature is refused at the start",
        why="its output has no field for probable tokens, unless the user asks for log-probabilities",
        until="vLLM returns probable tokens to its scheduler, whatever the user asks for",
    ),
)
