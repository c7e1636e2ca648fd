"""`histospec doctor`: finds out why a worker gets no drafts, or its responses are lost, and says what to do.

::

    settings ─► gather (asks the servers) ─► facts ─► checks, one function each ─► findings ─► report

It asks as a worker does, and leaves nothing behind on a server.
"""
