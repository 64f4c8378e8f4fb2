"""Calls as they are made: prepared, started, completed."""
