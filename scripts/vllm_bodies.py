"""Bodies of vLLM's functions that differ from those of every tested release, and that were read.

By name and digest (scripts/vllm_sources.py): what the function does otherwise, and why the adapter works with it.
docs/vllm-versions.md shows them with their releases.
"""

from histospec.client.vllm.needs import (
    CONFIG,
    CORE,
    DETOKENIZER,
    ENGINE_ARGS,
    REJECTION,
    REJECTION_V2,
    RUNNER,
    SCHEDULER,
    TOP_K_TOP_P,
    V2,
)

NO_DRAFTS = "does not read the configuration of speculation; a step without drafts is prepared as without speculation"

READ: dict[str, dict[str, str]] = {
    f"{CONFIG}.__post_init__": {
        "6ffbccd3aebf": "asks for the methods that asynchronous scheduling excludes with V1 only, so with V2 it would "
        "be on by default; the adapter sets it before. `make test-v2` runs it",
    },
    f"{CONFIG}._get_v2_model_runner_unsupported_features": {
        "37a0d8aaf7e7": "names two speculative methods that V2 lacks, not four; `make test-v2` runs it",
    },
    f"{V2}:init_speculator": {
        "1d0ff1a6887a": "knows more methods of drafters; HistoSpec's never reaches it. `make test-v2` runs it",
    },
    f"{REJECTION_V2}:rejection_sample": {
        "ce1c46ddf620": "has the lossy method `fly`, which the adapter refuses; the rest is replaced. `make test-v2` "
        "runs it",
    },
    f"{REJECTION_V2}:RejectionSampler._verify": {
        "4d784ddba41b": "passes the settings of `fly`. `make test-v2` runs it",
    },
    f"{V2}:GPUModelRunner.execute_model": {
        "407ac4d10fea": "updates inputs of encoders after `update_requests`, and proposes no drafts where the "
        "scheduler says that none is needed; it reads the numbers of tokens after `update_requests`, as before. "
        "`make test-v2` runs it",
    },
    f"{V2}:GPUModelRunner.sample_tokens": {
        "944df9f2f94b": "collects KV transfers before the drafter and ends them after it, and sends no drafts between "
        "pipeline stages without any; the copies of the outcome begin as before. `make test-v2` runs it",
    },
    f"{ENGINE_ARGS}.create_speculative_config": {
        "b9f9707b12d2": "takes the names of `speculative_config` as they are, without replacing hyphens",
    },
    f"{SCHEDULER}.update_from_output": {
        "fe49d152bf23": "no stale output of preempted requests, and statistics of KV transfers are read earlier; it "
        "appends, stops and frees in the same order",
        "01a09bf82278": "as in 0.23, and blocks may be freed a step later; the adapter reads no blocks",
        "4386d23e9768": "tokens that an asynchronous step discards do not count as rejected; the adapter needs "
        "synchronous steps",
        "e9697ff7c764": "counts tokens in flight, and `_free_request` returns two values, which the adapter passes on",
        "0fd57ec8e3bd": "sampling masks and encoder-only engines, without drafts",
        "36dc0b16b485": "fails requests whose KV transfer failed, through `finish_requests`, which ends their sessions",
        "e63c4782fa8c": "caches the blocks of accepted tokens at once, from the count that "
        "`_update_request_with_output` corrects, and adds streaming requests to the queue later. Sessions depend on "
        "neither; tests/vllm/test_history.py runs it in a real engine",
    },
    f"{SCHEDULER}._update_request_with_output": {
        "e77c13040581": "takes the tokens that it trims after a stop off `num_computed_tokens`. The request's tokens, "
        "its status and the list that it trims are as before; tests/vllm/test_history.py runs it in a real engine",
    },
    f"{SCHEDULER}._free_request": {
        "789ead3717db": "does not track prefills in flight",
        "5ee38d373f6e": "returns one value instead of two, which the adapter passes on",
        "1c2e771c8b40": "tells one more connector that the request has ended",
        "b0bbf95e551e": "also forgets encoder inputs that wait",
    },
    f"{SCHEDULER}.finish_requests": {
        "c01b790eef5e": "returns ids instead of requests, which the adapter passes on",
        "bb791a6cc18c": "frees the blocks of KV transfers that never started",
    },
    f"{CORE}.step": {
        "f604fffa1b4b": "calls `schedule` without an argument; the adapter's takes any",
        "dc821cbc2cab": "logs the step in another place; schedules, computes and updates in the same order",
    },
    f"{CORE}.post_step": {
        "86c69eb24284": "another name for the flag of speculation; takes drafts and hands them to the scheduler alike",
    },
    f"{DETOKENIZER}:IncrementalDetokenizer.from_new_request": {
        "d3cfff39749d": "another name for the class of fast tokenizers",
    },
    f"{TOP_K_TOP_P}:TopKTopPSampler.forward_native": {
        "8cb2b0039395": "no option for noise in double precision",
    },
    f"{TOP_K_TOP_P}:TopKTopPSampler.forward_cuda": {
        "47f35f947a23": "no option for noise in double precision",
        "7e6427026741": "names the modes of processed logprobs in place; the same two modes",
    },
    f"{REJECTION}:rejection_sample": {
        "99ef224c33e4": "no option for noise in double precision",
        "e9586f7ec481": "verifies with FLy, which accepts tokens that the model would not have sampled, if "
        "`rejection_sample_method` is 'fly'. The adapter refuses that setting",
    },
    f"{RUNNER}._prepare_inputs": {
        "2a435aa03d01": NO_DRAFTS,
        "11be87b84996": NO_DRAFTS,
        "be7fcd98269f": NO_DRAFTS,
        "c417a7a1fa51": NO_DRAFTS,
    },
    f"{RUNNER}.propose_draft_token_ids": {
        "332f393d2435": "reads no number of tokens from the step; calls `propose` of `custom_class` alike",
        "a0e2e574d7c9": "no Medusa; calls `propose` of `custom_class` alike",
    },
    f"{RUNNER}.sample_tokens": {
        "76a41bcef1b6": "decides in other words whether the drafter drafts; calls `_sample` and returns its "
        "output alike",
        "4a8979f341c9": "no passes of the drafter beside other data-parallel ranks; calls `_sample` and returns its "
        "output alike",
    },
}
