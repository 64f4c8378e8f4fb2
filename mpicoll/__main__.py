"""`python -m mpicoll run ...` is `mpicoll run ...`."""

import sys

from mpicoll.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
