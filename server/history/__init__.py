"""Keeps the index and the store in step."""
