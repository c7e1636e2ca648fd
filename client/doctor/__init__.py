"""`histospec doctor`: what keeps a worker from being helped by a draft server, and what to do about it.

::

    settings ─► gather (asks the servers) ─► facts ─► checks, one function each ─► findings ─► report

It asks as a worker would, from where it runs, and leaves nothing behind on a server.
"""
