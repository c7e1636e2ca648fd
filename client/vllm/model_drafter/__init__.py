"""Drafts of the server beside those of the model's own drafter: which of both is verified, and how many to ask for.

A model's own drafter (MTP and EAGLE heads, a small draft model) drafts inside vLLM's workers for every request of the
batch. `choice` takes the better of two drafts, `outcomes` learns how good they are, `amount` says how many tokens the
drafter is to make in the next step. Only `beside` knows vLLM.
"""
