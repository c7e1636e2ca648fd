"""Coupled sampling: exact samples whose noise is a function of their seed. HISTOSPEC_SAMPLING=coupled switches it on.

A response equals an old one with the same seed wherever the policy has not changed. The old response is then a draft
that is accepted for hundreds of tokens. Seeded output is also the same, token for token, for all drafts.
docs/coupled.md says what is exact, what is not, and which seeds to use.
"""
