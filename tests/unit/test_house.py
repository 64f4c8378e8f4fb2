"""What holds for the package as a whole: imports go down, and importing it does nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpicoll

PACKAGE = Path(mpicoll.__file__).parent

# Top to bottom. A room imports from the rooms below it and from itself, never from those above or beside it.
ROOMS = (
    {"__main__"},
    {"cli", "pytest_plugin", "distributed_c10d"},
    {"__init__"},
    {"nn", "training", "methods"},
    {"turns", "fused", "plans", "barriers", "backends", "device_mesh"},
    {"subgroups"},
    {"allocation", "collectives", "object_messages", "objects", "p2p", "stopping"},
    {"tcpstore"},
    {"stores"},
    {"runtime"},
    {"underway"},
    {"persistent"},
    {"deferred"},
    {"riding"},
    {"repeating"},
    {"execution"},
    {"lastwords"},
    {"patience"},
    {"leaving"},
    {"watchdog"},
    {"progress"},
    {"communicators"},
    {"matching"},
    {"topology", "devices", "capability"},
    {"profiles"},
    {"work"},
    {"groups"},
    {"exits"},
    {"checks"},
    {"waiting"},
    {"deadline"},
    {"signals"},
    {"kept"},
    {"engines"},
    {"buffers"},
    {"publishing", "shared", "compiled", "extension"},
    {"launch"},
    {"timelimit"},
    {"settings"},
    {"errors"},
    {"_version"},
)
FLOOR = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}

# Who may import mpi4py when it is imported itself; the others may within a function.
SPEAKS_MPI = {
    "checks",
    "communicators",
    "deferred",
    "engines",
    "execution",
    "groups",
    "leaving",
    "matching",
    "object_messages",
    "objects",
    "p2p",
    "persistent",
    "plans",
    "repeating",
    "riding",
    "runtime",
    "topology",
    "underway",
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    """Return the room that a file is in: its folder under the package, or its own name."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST, everywhere: bool = True) -> Iterator[str]:
    """Yield the dotted names that a module imports when it runs, those in functions only if ``everywhere``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif everywhere or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from imports(node, everywhere)


def rooms_imported(tree: ast.AST) -> Iterator[str]:
    for name in imports(tree):
        parts = name.split(".")
        if parts[0] == "mpicoll":
            below = parts[1] if len(parts) > 1 else "__init__"
            is_module = (PACKAGE / below).is_dir() or (PACKAGE / f"{below}.py").exists()
            yield below if is_module else "__init__"


def in_fresh_python(source: str) -> str:
    """Run a script in an interpreter of its own and return what it printed."""
    command = [sys.executable, "-c", textwrap.dedent(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    """No room imports from a room above it or beside it."""
    room = room_of(path)
    assert room in FLOOR, f"a new room: give {room} its floor in ROOMS"
    tree = ast.parse(path.read_text())
    up = {other for other in rooms_imported(tree) if other != room and FLOOR.get(other, -1) <= FLOOR[room]}
    assert not up, f"{room} imports upwards: {sorted(up)}"
    if room not in SPEAKS_MPI:
        assert not [name for name in imports(tree, everywhere=False) if name.split(".")[0] == "mpi4py"]
    assert ast.get_docstring(tree), "no docstring that says the module's job in one sentence"


def test_import_is_light() -> None:
    """Importing mpicoll imports neither MPI nor the packages that are needed later or never."""
    heavy = ["mpi4py.MPI", "rich", "torch", "cupy", "matplotlib", "sklearn", "pytest", "ml_dtypes"]
    source = f"import sys, mpicoll; print([name for name in {heavy!r} if name in sys.modules])"
    assert in_fresh_python(source) == "[]"


def test_import_starts_nothing() -> None:
    """Importing mpicoll changes no environment, starts no thread and no process, and takes no signal."""
    source = """
        import os, signal, threading
        from pathlib import Path
        import numpy  # its threads are not ours

        def state():
            children = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
            handlers = [signal.getsignal(number) for number in signal.valid_signals()]
            return dict(os.environ), threading.active_count(), children, handlers, sorted(os.listdir("/proc/self/fd"))

        before = state()
        import mpicoll
        print(state() == before)
    """
    assert in_fresh_python(source) == "True"


def test_import_without_mpi() -> None:
    """Without mpi4py the package can be imported, and says that MPI is not available."""
    source = """
        import sys

        class Without:
            def __init__(self, finder):
                self.finder = finder

            def find_spec(self, name, path=None, target=None):
                return None if name.split(".")[0] == "mpi4py" else self.finder.find_spec(name, path, target)

        sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
        import mpicoll
        print(mpicoll.is_mpi_available() if hasattr(mpicoll, "is_mpi_available") else False)
    """
    assert in_fresh_python(source) == "False"


def test_public_names() -> None:
    """``__all__`` is sorted, without repeats, and each of its names is there."""
    assert list(mpicoll.__all__) == sorted(set(mpicoll.__all__))
    source = """
        import mpi4py
        mpi4py.rc.initialize = False  # names resolve without starting MPI
        import mpicoll
        print([name for name in mpicoll.__all__ if not hasattr(mpicoll, name)])
    """
    assert in_fresh_python(source) == "[]"


def test_one_module_knows_cupy() -> None:
    """CuPy is imported in one place, which is loaded with the first array on a GPU."""
    users = [
        path
        for path in modules()
        if any(n.split(".")[0] == "cupy" for n in imports(ast.parse(path.read_text()), everywhere=True))
    ]
    assert users == [PACKAGE / "buffers" / "cuda.py"]


def _ends_with_a_branch(loop: ast.For | ast.While) -> bool:
    """Whether the way back to the start of a loop comes right after a branch."""
    if isinstance(loop, ast.While) and not (isinstance(loop.test, ast.Constant) and loop.test.value):
        return True
    last = loop.body[-1]
    while isinstance(last, ast.If) and last.orelse:
        last = last.orelse[-1]
    return isinstance(last, (ast.If, ast.Assert))


def _open_ways_back(node: ast.AST, guarded: bool) -> Iterator[int]:
    """Return the lines of loops inside a ``try`` or ``with`` whose way back Python 3.13 leaves out of it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.Lambda)):
            yield from _open_ways_back(child, False)
            continue
        if guarded and isinstance(child, (ast.For, ast.While)) and _ends_with_a_branch(child):
            yield child.lineno
        if guarded and isinstance(child, (ast.ListComp, ast.SetComp, ast.DictComp)):
            yield from (child.lineno for part in child.generators if part.ifs)
        if isinstance(child, ast.Try):
            for part in (*child.body, *child.orelse):
                yield from _open_ways_back(ast.Module([part], []), True)
            for rest in (*child.handlers, *child.finalbody):
                yield from _open_ways_back(ast.Module([rest], []), guarded or bool(child.finalbody))  # type: ignore[list-item]
        else:
            yield from _open_ways_back(child, guarded or isinstance(child, ast.With))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_what_a_signal_raises_in_a_loop_is_caught(path: Path) -> None:
    """A loop inside a ``try`` or ``with`` does not end with a branch: a handler that raises on the way back would leave it.

    Python 3.13 puts that jump outside of the ``try`` then: ``except`` and ``finally`` do not see the exception, and ``with`` does
    not give its lock back (https://github.com/python/cpython/issues/130279). ``while True`` with a ``break`` at its start, and
    ``continue`` before the last statement, are all right.
    """
    assert list(_open_ways_back(ast.parse(path.read_text()), False)) == []


def test_ways_back_that_are_open_are_found() -> None:
    """Those that Python 3.13 leaves open, and no others."""
    loops = {
        "while a(): b()": [2],
        "for x in a:\n  if x: break": [2],
        "for x in a:\n  if x: b()\n  elif c: d()": [2],
        "for x in a:\n  if x: b()\n  else: d()": [],
        "for x in a:\n  if not x: continue\n  break": [],
        "while True:\n  if x: break\n  b()": [],
        "c = [x for x in a if x]": [2],
        "c = [x for x in a]": [],
    }
    for loop, lines in loops.items():
        body = textwrap.indent(loop, "  ")
        assert list(_open_ways_back(ast.parse(loop), False)) == []
        for guarded in (f"try:\n{body}\nfinally: e()", f"with e:\n{body}"):
            assert list(_open_ways_back(ast.parse(guarded), False)) == lines, guarded
