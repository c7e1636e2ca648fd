"""What the adapters of the engines share: the draft sessions of requests, their options, epochs and log lines.

Nothing here imports an engine.
"""
