"""What the server says: one line an event, written by a thread of its own, so that it never waits for a reader."""
