"""The options of the server: their types, and where their values come from."""
