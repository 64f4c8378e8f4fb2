"""Give every test with tensors a default group that works, one thread for each rank, and reports of all failures."""

from __future__ import annotations

import torch

# As in tests/mpi: the names are fixtures and a hook of pytest.
from mpi.conftest import _initialised, _mpicoll, pytest_runtest_logreport  # noqa: F401

torch.set_num_threads(1)  # ranks share the cores
