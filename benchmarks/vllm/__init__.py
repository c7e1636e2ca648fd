"""Inside real vLLM."""
