"""`histospec replay`: estimates on recorded rollouts what drafts would gain."""
