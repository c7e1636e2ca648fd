"""What a large GPU makes of it."""
