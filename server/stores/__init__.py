"""Stores of responses: on a disk, or in Redis."""
