"""Blocks that one rank runs first while the other ranks wait (`zero_first` and similar functions)."""
