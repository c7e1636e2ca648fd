"""The SGLang adapter: rollouts with drafts, as a plug-in of SGLang's own (entry points `sglang.srt.plugins`).

    --speculative-algorithm NGRAM --speculative-num-draft-tokens 17 --disable-overlap-schedule

Set HISTOSPEC_ENDPOINT and HISTOSPEC_NAMESPACE, too; or these and HISTOSPEC_ENABLE=1, without SGLang's arguments.

SGLang's NGRAM worker verifies a fixed number of places in each step. The adapter puts the server's draft into a
request's places; a request without a draft keeps SGLang's own n-grams. `plugin` lists the functions of SGLang that are
wrapped. docs/sglang.md says what was run, and what was read.
"""
