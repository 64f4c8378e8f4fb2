"""The names of ``torch.distributed.device_mesh``, by the path that programs import them from."""

from __future__ import annotations

from mpicoll.api.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]
