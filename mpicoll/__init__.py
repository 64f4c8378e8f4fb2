"""The API of ``torch.distributed`` over MPI."""

from mpicoll._version import __version__

__all__ = ["__version__"]
