"""Names under which torch.distributed finds this library."""

from __future__ import annotations

NAME = "mpicoll"
SCHEME = "mpi"
DEVICES = ["cpu", "cuda"]
