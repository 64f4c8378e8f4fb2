"""Check that all members of a group make the same calls, and that memory in use is left alone."""
