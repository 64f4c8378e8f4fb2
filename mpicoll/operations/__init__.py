"""Prepare, start and complete calls."""
