"""What the program passes, as flat memory: layouts, dtypes, devices, pickled objects."""
