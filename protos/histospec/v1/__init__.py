"""The wire: messages and stubs generated from draft.proto."""
