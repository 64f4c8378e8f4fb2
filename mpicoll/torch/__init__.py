"""A backend of ``torch.distributed`` over this library: ``import mpicoll.torch``, then ``init_process_group("mpicoll")``.

The import registers the backend ``"mpicoll"`` for CPU and CUDA tensors, and the rendezvous ``"mpi://"``. It does not load MPI. No
other package of the library imports torch (docs/torch.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpicoll.torch.versions import check_version

check_version()

from mpicoll.torch.registration import load_backend, register  # noqa: E402

if TYPE_CHECKING:
    from mpicoll.torch.backend import group_of as group_of
    from mpicoll.torch.backend import wrap as wrap

__all__ = ["group_of", "wrap"]

register()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(load_backend(), name)
