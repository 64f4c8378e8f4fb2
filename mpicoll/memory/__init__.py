"""Adapt arrays and objects of the program to flat memory: layouts, dtypes, devices, pickled objects."""
