"""A backend of ``torch.distributed`` over this library: ``import mpicoll.torch``, then ``init_process_group("mpicoll")``.

The import registers the backend ``"mpicoll"`` for CPU and CUDA tensors, and the rendezvous ``"mpi://"``. It starts nothing. This
package is the only one that imports torch (docs/torch.md).
"""

from __future__ import annotations

from mpicoll.torch.versions import check_version

check_version()

from mpicoll.torch.backend import group_of as group_of  # noqa: E402
from mpicoll.torch.backend import register  # noqa: E402
from mpicoll.torch.backend import wrap as wrap  # noqa: E402

__all__ = ["group_of", "wrap"]

register()
