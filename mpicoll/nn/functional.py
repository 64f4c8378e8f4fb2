"""Differentiable collectives on torch's tensors (``torch.distributed.nn.functional``): see :mod:`mpicoll.torch.functional`."""

from mpicoll.torch.functional import all_gather as all_gather
from mpicoll.torch.functional import all_reduce as all_reduce
from mpicoll.torch.functional import all_to_all as all_to_all
from mpicoll.torch.functional import all_to_all_single as all_to_all_single
from mpicoll.torch.functional import broadcast as broadcast
from mpicoll.torch.functional import gather as gather
from mpicoll.torch.functional import reduce as reduce
from mpicoll.torch.functional import reduce_scatter as reduce_scatter
from mpicoll.torch.functional import scatter as scatter

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]
