"""`histospec doctor`: finds out why a worker gets no drafts or why its responses are lost, and says what to do.

::

    settings ─► gather (asks the servers) ─► facts ─► checks, one function each ─► findings ─► report

It sends the same calls as a worker, and leaves nothing behind on a server.
"""
