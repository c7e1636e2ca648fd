"""Keeps the index and the store consistent."""
