"""Drafts under vLLM's asynchronous scheduling, with model runner V2. docs/vllm-v2.md shows the flow of a step.

The scheduler reserves places before the drafts exist, and commits finished responses. The speculator, in the workers,
asks the server, and each step computes the places that a draft fills. The two exchange `messages`, which travel with
vLLM's own.
"""
