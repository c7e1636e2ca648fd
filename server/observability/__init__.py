"""What is counted, what happened lately, and the HTTP port that shows it."""
