"""Messages and stubs generated from draft.proto."""
