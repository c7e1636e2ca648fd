"""Where responses are kept: on a disk, or in Redis."""
