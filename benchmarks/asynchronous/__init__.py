"""How drafts reach a GPU under asynchronous scheduling: a simulation."""
