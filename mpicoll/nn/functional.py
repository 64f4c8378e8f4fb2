"""Differentiable collectives on torch's tensors (``torch.distributed.nn.functional``): see :mod:`mpicoll.torch.functional`."""

from mpicoll.torch.functional import *  # noqa: F403
from mpicoll.torch.functional import __all__ as __all__
