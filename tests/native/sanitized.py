"""Run pytest on a build of the C extension with the address and undefined-behaviour sanitizers.

``python tests/native/sanitized.py build FOLDER`` makes the folder: links to the package, the extension, and the name of the
library that has to be loaded first. ``python tests/native/sanitized.py pytest ...`` runs pytest on the package in `FOLDER`.
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv-mpich" / "sanitized"
OPTIONS = (
    "-std=gnu11",
    "-O1",
    "-g",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-fPIC",
    "-shared",
    "-Wall",
    "-Wextra",
    "-Werror",
)
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")
SETTINGS = {
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",  # Python and MPI free little at the end
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def build(folder: Path) -> None:
    """Make the folder: links to all of the package, and the extension in the place of the usual build."""
    found = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    library = found.stdout.strip()
    if not os.path.isabs(library):
        raise SystemExit("this machine lacks libasan")
    shutil.rmtree(folder, ignore_errors=True)
    package = folder / "mpicoll"
    package.mkdir(parents=True)
    for path in (ROOT / "mpicoll").iterdir():
        if path.suffix != ".so" and path.name != "__pycache__":
            (package / path.name).symlink_to(path)
    sys.path.insert(0, str(folder))
    from mpicoll.runtime.native import VERSION

    name = f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    sources = sorted(str(path) for path in (ROOT / "mpicoll" / "native").rglob("*.c"))
    about = (f"-I{sysconfig.get_paths()['include']}", f'-DVERSION="{VERSION}"')
    subprocess.run(["gcc", *OPTIONS, *SANITIZERS, *about, *sources, "-o", str(package / name)], check=True)
    (folder / "library").write_text(library)


def run(arguments: list[str]) -> None:
    """Run a module of Python, with the sanitizers loaded before all else, on the package in the folder."""
    if "LD_PRELOAD" not in os.environ:
        environment = {**os.environ, **SETTINGS, "LD_PRELOAD": (FOLDER / "library").read_text()}
        os.execve(sys.executable, [sys.executable, __file__, *arguments], environment)
    sys.path[0] = str(FOLDER)
    sys.argv = arguments
    from mpicoll.runtime import native

    if native.found is None or not native.found.__file__.startswith(str(FOLDER)):
        raise SystemExit(f"not the extension with sanitizers: {native.found} {native.why_not}")
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    if sys.argv[1] == "build":
        build(Path(sys.argv[2]).resolve())
    else:
        run(sys.argv[1:])
