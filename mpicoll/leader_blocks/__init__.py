"""Blocks that one rank runs first: zero_first and its kin."""
