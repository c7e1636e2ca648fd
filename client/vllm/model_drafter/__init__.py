"""Chooses between the server's drafts and those of the model's own drafter, and how many tokens the latter makes.

A model's own drafter (MTP and EAGLE heads, a small draft model) drafts inside vLLM's workers for every request of the
batch. `choice` takes the better of two drafts, `outcomes` learns how good they are, and `amount` decides how many
tokens the drafter makes in the next step. Only `beside` touches vLLM.
"""
