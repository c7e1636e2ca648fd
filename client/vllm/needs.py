"""What the adapter relies on in vLLM's code. `python -m scripts.vllm_versions` looks for all of it in vLLM's sources.

Three lists make up the whole:

- `interface.py`: the scheduler's classes, declared for type checkers;
- `patches.PATCHES`: the functions that HistoSpec replaces;
- NEEDS below: everything else, and what the first two lists cannot say.

tests/client/test_vllm_needs.py compares the lists with the adapter's code: a name of vLLM that no list has fails there.
"""

from typing import NamedTuple


class Need(NamedTuple):
    """A name of vLLM, and what the adapter relies on.

    Attributes:
        symbol: `module:qualified name` of a class, function, method, attribute or variable. A class may inherit it.
        has: attributes of this class.
        begins: the parameters that the function must begin with, in order; others may follow.
        takes: parameters that the function must accept by name.
        body: the adapter relies on what the function does, beyond its signature.
        since: the first release in which the adapter uses it; empty: all.
        without: what happens with a vLLM that lacks it or has another signature; empty: the adapter does not work.
    """

    symbol: str
    has: tuple[str, ...] = ()
    begins: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    body: bool = False
    without: str = ""
    since: str = ""


SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
CORE = "vllm.v1.engine.core:EngineCore"
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
V2 = "vllm.v1.worker.gpu.model_runner"
RUNNER_V2 = f"{V2}:GPUModelRunner"
CONFIG = "vllm.config.vllm:VllmConfig"
REJECTION = "vllm.v1.sample.rejection_sampler"
REJECTION_V2 = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
TOP_K_TOP_P = "vllm.v1.sample.ops.topk_topp_sampler"
DETOKENIZER = "vllm.v1.engine.detokenizer"
SPECULATIVE = "vllm.config.speculative:SpeculativeConfig"
SAMPLING = "vllm.sampling_params"
ENGINE_ARGS = "vllm.engine.arg_utils:EngineArgs"

_SAMPLE = ("logits", "generators", "k", "p")
NO_SETTING = "it does not exist, so there is nothing to check"
"""For settings that the adapter only refuses."""

FIRST_V2 = "0.32.0"
"""The first release whose model runner V2 verifies drafts of the server; with older ones vLLM uses V1."""

_NO_V2 = "drafts go through vLLM's model runner V1, whatever vLLM would choose"
_NO_ASYNC = "asynchronous scheduling is refused at the start"
_NOT_ENABLED = "`HISTOSPEC_ENABLE=1` is refused at the start"
_NO_NUMBER = "the model's own drafter makes all its tokens in every step"

NEEDS = (
    # The scheduler's steps: which tokens vLLM keeps, and where it takes drafts.
    Need(f"{SCHEDULER}.update_from_output", body=True),
    Need(f"{SCHEDULER}._update_request_with_output", begins=("self", "request", "new_token_ids"), body=True),
    Need(f"{SCHEDULER}.update_draft_token_ids", body=True),
    Need(f"{SCHEDULER}.add_request", body=True),
    Need(f"{SCHEDULER}.finish_requests", body=True),
    Need(f"{SCHEDULER}._free_request", body=True),
    Need("vllm.v1.core.sched.utils:check_stop", begins=("request", "max_model_len"), body=True),
    Need(f"{CORE}.step", body=True),
    Need(f"{CORE}.post_step", body=True),
    Need(CORE, has=("scheduler",)),
    Need("vllm.v1.core.sched.output:SchedulerOutput.num_spec_tokens_to_schedule", without=_NO_NUMBER),
    Need("vllm.v1.request:Request.prompt_is_token_ids", without=NO_SETTING),
    # The workers: where they call the drafter, and what the patches read.
    Need("vllm.v1.worker.worker_base:WorkerBase.__init__", begins=("self", "vllm_config"), body=True),
    Need(RUNNER, has=("input_batch", "sampler", "use_async_scheduling", "take_draft_token_ids")),
    Need(f"{RUNNER}.propose_draft_token_ids", begins=("self", "scheduler_output", "sampled_token_ids"), body=True,
         without=_NO_NUMBER),
    Need(f"{RUNNER}._prepare_inputs", begins=("self", "scheduler_output", "num_scheduled_tokens"), body=True,
         without="steps without drafts cost 5 % more"),
    Need(f"{RUNNER}.speculative_config"),
    Need(f"{RUNNER}._sample", begins=("self", "logits", "spec_decode_metadata"), body=True),
    Need(f"{RUNNER}.sample_tokens", begins=("self", "grammar_output")),
    Need("vllm.v1.spec_decode.custom_class_proposer:create_custom_proposer", body=True),
    Need("vllm.v1.worker.gpu_input_batch:InputBatch",
         has=("req_ids", "generators", "token_ids_cpu", "num_tokens_no_spec")),
    Need("vllm.v1.spec_decode.metadata:SpecDecodeMetadata", has=("num_draft_tokens",)),
    Need("vllm.v1.sample.sampler:Sampler", has=("topk_topp_sampler",)),
    Need(f"{REJECTION}:MAX_SPEC_LEN"),
    Need(f"{REJECTION}:rejection_sample",
         begins=("draft_token_ids", "num_draft_tokens", "max_spec_len", "cu_num_draft_tokens", "draft_probs",
                 "target_logits", "bonus_token_ids", "sampling_metadata"), body=True),
    Need(f"{REJECTION}:expand_batch_to_tokens",
         begins=("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"), body=True,
         without="sampling in the CPU build stays as it is"),
    Need(f"{TOP_K_TOP_P}:TopKTopPSampler", has=("forward", "logprobs_mode")),
    Need(f"{TOP_K_TOP_P}:TopKTopPSampler.forward_native", begins=("self", *_SAMPLE), body=True),
    Need(f"{TOP_K_TOP_P}:TopKTopPSampler.forward_cuda", begins=("self", *_SAMPLE), body=True),
    Need(f"{TOP_K_TOP_P}:apply_top_k_top_p", begins=("logits", "k", "p")),
    Need(f"{CORE}.set_weight_version", begins=("self", "weight_version"), body=True,
         without="responses get their epoch from counted weight changes"),
    # Model runner V2: where it takes drafts from.
    Need(f"{CONFIG}._get_v2_model_runner_unsupported_features", begins=("self",), body=True,
         without=_NO_V2, since=FIRST_V2),
    Need(f"{CONFIG}.__post_init__", begins=("self",), body=True, without=_NO_V2, since=FIRST_V2),
    Need(f"{V2}:init_speculator", begins=("vllm_config", "device", "req_states"), without=_NO_V2, since=FIRST_V2),
    Need("vllm.v1.worker.gpu.spec_decode.speculator:BaseSpeculator",
         has=("init_cudagraph_manager", "capture", "propose"), without=_NO_V2, since=FIRST_V2),
    Need(RUNNER_V2, has=("req_states", "speculator"), without=_NO_V2, since=FIRST_V2),
    Need(f"{RUNNER_V2}.execute_model", begins=("self", "scheduler_output"), body=True,
         without=_NO_ASYNC, since=FIRST_V2),
    Need(f"{RUNNER_V2}.update_requests", begins=("self", "scheduler_output"), body=True,
         without=_NO_V2, since=FIRST_V2),
    Need(f"{RUNNER_V2}.take_draft_token_ids", begins=("self",), body=True, without=_NO_V2, since=FIRST_V2),
    Need(f"{RUNNER_V2}.gather_batch_req_state", begins=("self", "scheduler_output"), body=True,
         without=_NO_V2, since=FIRST_V2),
    Need("vllm.v1.worker.gpu.states:RequestState", has=("draft_tokens", "req_id_to_index"),
         without=_NO_V2, since=FIRST_V2),
    Need("vllm.v1.worker.gpu.input_batch:InputBatch", has=("idx_mapping",), without=_NO_V2, since=FIRST_V2),
    Need(f"{REJECTION_V2}:rejection_sample",
         begins=("target_logits", "draft_logits", "draft_sampled", "cu_num_logits", "pos", "idx_mapping",
                 "expanded_idx_mapping", "expanded_local_pos", "temperature", "seed", "num_speculative_steps"),
         takes=("use_fp64",), body=True, without=_NO_V2, since=FIRST_V2),
    Need(f"{REJECTION_V2}:RejectionSampler._verify", body=True,
         without=_NO_V2, since=FIRST_V2),
    Need("vllm.v1.worker.gpu.sample.gumbel:gumbel_sample",
         begins=("logits", "expanded_idx_mapping", "temperature", "seed", "pos", "apply_temperature", "is_drafting"),
         takes=("use_fp64",), body=True, without=_NO_V2, since=FIRST_V2),
    # Asynchronous scheduling with V2: the messages of a step, and the host's copies of its outcome.
    Need("vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule", body=True,
         without=_NO_ASYNC, since=FIRST_V2),
    Need("vllm.v1.core.sched.output:SchedulerOutput",
         has=("finished_req_ids", "preempted_req_ids", "num_invalid_spec_tokens"),
         without=_NO_ASYNC, since=FIRST_V2),
    Need("vllm.v1.core.sched.output:NewRequestData", has=("prefill_token_ids", "prompt_len"),
         without=_NO_ASYNC, since=FIRST_V2),
    Need(f"{RUNNER_V2}.sample_tokens", begins=("self",), body=True, without=_NO_ASYNC, since=FIRST_V2),
    Need("vllm.v1.worker.gpu.async_utils:AsyncOutput",
         has=("copy_event", "num_sampled_tokens_np", "sampled_token_ids", "model_runner_output"),
         without=_NO_ASYNC, since=FIRST_V2),
    Need("vllm.distributed.parallel_state:get_tp_group", without=_NO_ASYNC, since=FIRST_V2),
    Need("vllm.distributed.parallel_state:GroupCoordinator", has=("rank_in_group", "world_size", "broadcast_object"),
         without=_NO_ASYNC, since=FIRST_V2),
    Need("vllm.config.vllm:NgramGPUTypes", without=_NO_ASYNC, since=FIRST_V2),
    Need("vllm.config.parallel:ParallelConfig.prefill_context_parallel_size", without=NO_SETTING),
    # The configuration.
    Need("vllm.platforms:current_platform"),
    Need("vllm.platforms.interface:Platform", has=("is_cpu",)),
    Need(CONFIG,
         has=("speculative_config", "scheduler_config", "parallel_config", "model_config")),
    Need(f"{CONFIG}.use_v2_model_runner", without=NO_SETTING),
    Need(f"{CONFIG}.watermark_config", without=NO_SETTING),
    Need("vllm.config.scheduler:SchedulerConfig", has=("async_scheduling", "scheduler_cls")),
    Need("vllm.config.parallel:ParallelConfig",
         has=("pipeline_parallel_size", "data_parallel_size", "world_size", "distributed_executor_backend")),
    Need(SPECULATIVE, has=("method", "model", "num_speculative_tokens", "parallel_drafting")),
    Need(f"{SPECULATIVE}.draft_sample_method", without=NO_SETTING),
    Need(f"{SPECULATIVE}.rejection_sample_method", without=NO_SETTING),
    Need(f"{SPECULATIVE}.enable_adaptive_verification", without=NO_SETTING),
    Need(f"{SPECULATIVE}.num_speculative_tokens_per_batch_size", without=NO_SETTING),
    Need("vllm.config.model:ModelConfig",
         has=("get_vocab_size", "has_inner_state", "max_model_len", "skip_tokenizer_init", "logprobs_mode",
              "try_get_generation_config", "runner_type")),
    Need("vllm.config.model:ModelConfig.use_fp64_gumbel", without=NO_SETTING),
    # HISTOSPEC_ENABLE=1: settings that it fills in, and settings of the user that it looks at.
    Need(f"{ENGINE_ARGS}.create_speculative_config",
         begins=("self", "target_model_config", "target_parallel_config"), body=True, without=_NOT_ENABLED),
    Need(f"{ENGINE_ARGS}.__post_init__"),
    Need(
        ENGINE_ARGS,
        has=(
            "speculative_config", "scheduler_cls", "async_scheduling", "logits_processors", "compilation_config",
            "enable_lora", "max_num_seqs", "max_num_batched_tokens",
        ),
    ),
    Need(f"{ENGINE_ARGS}.spec_method", without=NO_SETTING),
    Need(f"{ENGINE_ARGS}.spec_model", without=NO_SETTING),
    Need(f"{ENGINE_ARGS}.spec_tokens", without=NO_SETTING),
    # Stop strings: a stand-in for a request goes through vLLM's own detokenizer.
    Need("vllm.tokenizers:cached_tokenizer_from_config", begins=("model_config",)),
    Need(f"{DETOKENIZER}:IncrementalDetokenizer.from_new_request", begins=("cls", "tokenizer", "request"), body=True),
    Need(f"{DETOKENIZER}:BaseIncrementalDetokenizer.__init__", body=True),
    Need(f"{DETOKENIZER}:BaseIncrementalDetokenizer.update", begins=("self", "new_token_ids", "stop_terminated"),
         body=True),
    Need(f"{DETOKENIZER}:FastIncrementalDetokenizer.__init__", body=True),
    Need(f"{DETOKENIZER}:SlowIncrementalDetokenizer.__init__", body=True),
    # SPEC-RL.
    Need(f"{SAMPLING}:SamplingParams",
         has=("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
              "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "structured_outputs", "logprobs",
              "prompt_logprobs", "flat_logprobs", "detokenize", "output_kind", "ignore_eos",
              "skip_reading_prefix_cache")),
    Need(f"{SAMPLING}:SamplingParams.thinking_token_budget", without=NO_SETTING),
    Need(f"{SAMPLING}:RequestOutputKind", has=("FINAL_ONLY",)),
    Need("vllm.outputs:RequestOutput", has=("prompt_logprobs", "outputs")),
    Need("vllm.outputs:CompletionOutput", has=("token_ids", "logprobs", "finish_reason")),
    Need("vllm.logprobs:FlatLogprobs", has=("logprobs", "start_indices")),
    Need("vllm.entrypoints.llm:LLM", has=("llm_engine", "generate", "get_tokenizer")),
    Need("vllm.v1.engine.llm_engine:LLMEngine", has=("vllm_config",)),
)  # fmt: skip
