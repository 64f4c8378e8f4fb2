"""The reports that users read."""
