"""`histospec replay`: what drafting would gain on recorded rollouts."""
