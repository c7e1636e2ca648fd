"""Measurements in real vLLM."""
