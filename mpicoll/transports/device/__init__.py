"""Transport of memory of a GPU."""
