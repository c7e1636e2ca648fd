"""Drafts under vLLM's asynchronous scheduling, with model runner V2. docs/vllm-v2.md shows the flow of a step.

The scheduler decides how many places each request gets before its drafts exist, and commits finished responses. The
speculator, in the workers, asks the server and fills the places. The two exchange `messages`, which travel with vLLM's
own.
"""
