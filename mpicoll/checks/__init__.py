"""Check that all members of a group make the same calls, and that nothing writes memory that pending operations use."""
