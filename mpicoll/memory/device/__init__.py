"""Arrays in the memory of a GPU."""
