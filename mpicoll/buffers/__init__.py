"""What the user passed, as memory."""
