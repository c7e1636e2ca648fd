"""Responses in one SQLite file on the server's disk."""
