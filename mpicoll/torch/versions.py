"""Check the installed torch before any of its names is used."""

from __future__ import annotations

import importlib.util

OLDEST = "2.13"
"""The oldest torch with which the tests of the backend have run."""


def check_version() -> None:
    """Raise ImportError if torch is not installed, or is too old, or has no torch.distributed."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:  # a folder of this name on the path of modules has no origin
        raise ImportError('mpicoll.torch needs PyTorch, which is not installed: pip install "mpicoll[torch]"')
    import torch  # type: ignore[import-not-found,unused-ignore]

    number = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if number < tuple(map(int, OLDEST.split("."))):
        raise ImportError(
            f'mpicoll.torch needs torch {OLDEST} or later, not {torch.__version__}: pip install "torch>={OLDEST}"'
        )
    if not torch.distributed.is_available():
        raise ImportError("mpicoll.torch needs a torch that was built with torch.distributed (USE_DISTRIBUTED=1)")
