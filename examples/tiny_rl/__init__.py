"""A small, real RL run; README.md says what it shows."""
