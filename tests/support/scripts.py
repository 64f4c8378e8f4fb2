"""Load a script that is in no package, such as ``docs/generate.py``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["load"]


def load(path: Path, name: str = "") -> ModuleType:
    """Return a script as a module of this name, or of the name of its file."""
    spec = importlib.util.spec_from_file_location(name or path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up the module there
    spec.loader.exec_module(module)
    return module
