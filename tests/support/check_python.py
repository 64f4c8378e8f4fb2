"""Print in one line what this Python lacks to make the test environments; exit 1 if it lacks a part.

Written for any Python 3, so that an old Python answers, too.
"""

import importlib.util
import sys

problem = ""
if sys.version_info < (3, 10):  # noqa: UP036
    problem = "{} is Python {}.{}, and mpicoll needs 3.10 or newer".format(sys.executable, *sys.version_info[:2])
elif any(importlib.util.find_spec(name) is None for name in ("venv", "ensurepip")):
    problem = "{} has no venv: install it (Debian and Ubuntu: apt install python3-venv)".format(sys.executable)  # noqa: UP032
if problem:
    sys.exit("mpicoll: " + problem + ", or name another Python: make PYTHON=/path/to/python3 ...")
