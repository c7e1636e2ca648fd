"""Coupled sampling: exact samples that agree with their own past. HISTOSPEC_SAMPLING=coupled switches it on.

A response drawn with the same seed as an old one equals it wherever the policy has not moved, so that the old one is a
draft which is accepted for hundreds of tokens. And seeded output is the same token for token whatever was drafted.
docs/coupled.md: what is exact, what is not, and which seeds to use.
"""
