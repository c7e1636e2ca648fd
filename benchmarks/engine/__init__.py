"""Measurements of index and drafter in process."""
