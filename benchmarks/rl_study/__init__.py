"""Runs whole RL runs, by method and seed."""
