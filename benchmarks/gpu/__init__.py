"""Measurements on a large GPU."""
