"""What a server is told: options, where they are read, and their types."""
