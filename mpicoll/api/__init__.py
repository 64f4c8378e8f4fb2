"""The functions and classes that programs call."""
