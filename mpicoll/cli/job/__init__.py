"""The job map of ``mpicoll doctor``."""
