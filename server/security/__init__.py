"""Tokens, certificates, and the files that hold them."""
