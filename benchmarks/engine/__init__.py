"""Index and drafter in process."""
