"""The command ``mpicoll bench``."""
