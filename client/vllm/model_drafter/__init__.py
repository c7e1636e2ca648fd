"""Chooses between the server's drafts and those of the model's own drafter, and how many tokens the latter makes.

A model's own drafter (MTP and EAGLE heads, a small draft model) drafts inside vLLM's workers for every request of the
batch. `steering` decides for the whole batch who drafts, and how many tokens the drafter makes; `yields` estimates what
each of the four `ways` is worth. `choice` takes the better of two drafts for each request; `outcomes` and `gains` learn
how good they are. Only `beside` touches vLLM.
"""
