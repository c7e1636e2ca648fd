"""Metrics, the recent past, and the HTTP port that shows them."""
