"""Measurements beside the peers; README.md says what each is for."""
