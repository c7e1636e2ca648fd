"""The server's log: one line per event, written by a separate thread, so that logging never blocks."""
