"""Whole RL runs, by method and seed."""
