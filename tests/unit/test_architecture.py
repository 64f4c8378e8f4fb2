"""What holds for the package as a whole: imports go down, files are short, and importing it does nothing.

The architecture is described in docs/design.md.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import mpicoll

PACKAGE = Path(mpicoll.__file__).parent

# From the bottom to the top. A file imports from its own layer or from one further down; no files import each other in a circle.
LAYERS = (
    "runtime",
    "memory",
    "transports",
    "diagnosis",
    "checks",
    "groups",
    "operations",
    "lifecycle",
    "api",
    "on api",
    "public",
    "tools",
    "start",
)
FLOOR = {name: floor for floor, name in enumerate(LAYERS)}
# The layers of files whose folders are not named like their layer.
LAYER_OF = {
    **dict.fromkeys(("errors", "_version"), "runtime"),
    **dict.fromkeys(("nn", "torch", "training", "leader_blocks", "stores"), "on api"),
    **dict.fromkeys(("__init__", "device_mesh", "distributed_c10d"), "public"),
    **dict.fromkeys(("cli", "pytest_plugin"), "tools"),
    "__main__": "start",
}
# Starting jobs: it imports `errors` and `runtime.settings` only, and only these import it.
LAUNCH_IMPORTS = {"errors", "runtime/settings", "runtime/output"}
IMPORT_LAUNCH = ("launch/", "lifecycle/", "cli/", "pytest_plugin/", "api/job", "torch/registration", "__init__")

# Files that may import mpi4py, by how their paths begin.
SPEAKS_MPI = (
    "runtime/mpi_library",
    "transports/",
    "diagnosis/board",
    "diagnosis/node_board",
    "groups/communicators",
    "operations/group_creation",
    "lifecycle/",
    "cli/bench/measure",
    "cli/job/",
    "pytest_plugin/ranks",
)

# ---- what is still wrong: these lists may only become shorter ----

SPEAKS_MPI_TOO = {
    "checks/memory_ranges",
    "operations/execution",
}
UPWARD: set[tuple[str, str]] = set()
LAUNCH_TOO: set[tuple[str, str]] = set()
LONG: dict[str, int] = {}
MOST_INSIDE = 55

# ---- sizes ----

MOST_LINES = 500
MOST_IN_ROOT = 12
MOST_IN_FOLDER = 15


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """Return a file's path in the package without its ending."""
    return path.relative_to(PACKAGE).as_posix().removesuffix(".py")


def layer_of(name: str) -> str:
    """Return the layer that a file is in: "launch" for what starts jobs."""
    first = name.partition("/")[0]
    if first == "launch" or first in FLOOR:
        return first
    return LAYER_OF[first]


def imports(tree: ast.AST, everywhere: bool = True) -> Iterator[str]:
    """Yield the dotted names that a module imports: in functions and for types only too if ``everywhere``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not everywhere and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif everywhere or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from imports(node, everywhere)


def file_of(dotted: str) -> str | None:
    """Return the file of the package that an imported name comes from, or None if it is of another package."""
    parts = dotted.split(".")
    if parts[0] != "mpicoll":
        return None
    for length in range(len(parts), 1, -1):
        name = "/".join(parts[1:length])
        if (PACKAGE / f"{name}.py").exists():
            return name
        if (PACKAGE / name).is_dir():
            return f"{name}/__init__"
    return "__init__"


def arrows() -> dict[str, set[str]]:
    """Return the files that each file imports, wherever in it."""
    found = {}
    for path in modules():
        names = (file_of(dotted) for dotted in imports(ast.parse(path.read_text())))
        found[name_of(path)] = {name for name in names if name is not None} - {name_of(path)}
    return found


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected parts of a graph that have more than one node (Tarjan 1972)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        number[node] = lowest[node] = len(number)
        stack.append(node)
        for other in edges.get(node, ()):
            if other not in number:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in stack:
                lowest[node] = min(lowest[node], number[other])
        if lowest[node] == number[node]:
            part = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(part) > 1:
                found.append(sorted(part))

    for node in edges:
        if node not in number:
            visit(node)
    return found


def upward(edges: Mapping[str, set[str]]) -> set[tuple[str, str]]:
    """Return the imports from a layer further up; those to and from ``launch`` stand apart."""
    return {
        (name, other)
        for name, others in edges.items()
        for other in others
        if "launch" not in (layer_of(name), layer_of(other)) and FLOOR[layer_of(other)] > FLOOR[layer_of(name)]
    }


def of_launch(edges: Mapping[str, set[str]]) -> set[tuple[str, str]]:
    """Return the imports that ``launch`` must not make, and those of it that others must not make."""
    return {
        (name, other)
        for name, others in edges.items()
        for other in others
        if (layer_of(name) == "launch" and layer_of(other) != "launch" and other not in LAUNCH_IMPORTS)
        or (layer_of(other) == "launch" and not name.startswith(IMPORT_LAUNCH))
    }


def in_fresh_python(source: str) -> str:
    """Run a script in an interpreter of its own and return what it printed."""
    command = [sys.executable, "-c", textwrap.dedent(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_no_import_goes_up() -> None:
    """No file imports from a layer further up, wherever in it and for types only too."""
    assert upward(arrows()) == UPWARD


def test_no_circles() -> None:
    """No files import each other in a circle."""
    assert circles(arrows()) == []


def test_launch_stands_beside() -> None:
    """What starts jobs imports nothing of the layers but errors and settings, and few files import it."""
    assert of_launch(arrows()) == LAUNCH_TOO


def test_wrong_arrows_are_found() -> None:
    """An arrow up, a circle, and an import of ``launch`` from a layer are each found."""
    edges = {
        "runtime/a": {"memory/b"},
        "memory/b": {"memory/c"},
        "memory/c": {"memory/b", "launch/job"},
        "launch/job": {"api/d"},
    }
    assert upward(edges) == {("runtime/a", "memory/b")}
    assert circles(edges) == [["memory/b", "memory/c"]]
    assert of_launch(edges) == {("memory/c", "launch/job"), ("launch/job", "api/d")}


def test_files_that_speak_mpi() -> None:
    """mpi4py is imported where communicators are handled only."""
    speakers = {
        name_of(path)
        for path in modules()
        if any(name.split(".")[0] == "mpi4py" for name in imports(ast.parse(path.read_text()), everywhere=False))
    }
    assert {name for name in speakers if not name.startswith(SPEAKS_MPI)} == SPEAKS_MPI_TOO


def test_sizes() -> None:
    """No file is longer than 500 lines but for a reason; few files stand in the root and in each folder."""
    lines = {name_of(path): path.read_text().count("\n") for path in modules()}
    long = {name: count for name, count in lines.items() if count > MOST_LINES}
    assert set(long) == set(LONG)
    assert all(count <= LONG[name] for name, count in long.items()), long
    sources = {path: path.read_text().count("\n") for path in PACKAGE.joinpath("native").rglob("*.[ch]")}
    assert all(count <= MOST_LINES for count in sources.values()), sources
    folders = Counter(path.parent for path in [*modules(), *sources])
    assert folders.pop(PACKAGE) <= MOST_IN_ROOT
    assert max(folders.values()) <= MOST_IN_FOLDER


def test_imports_inside_functions() -> None:
    """Few imports of the package's own modules stand inside functions."""
    inside = 0
    for path in modules():
        tree = ast.parse(path.read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        statements = {node for function in functions for node in ast.walk(function)}
        inside += sum(
            any(file_of(name) for name in imports(ast.Module([node], [])))  # type: ignore[list-item]
            for node in statements
            if isinstance(node, (ast.Import, ast.ImportFrom))
        )
    assert inside <= MOST_INSIDE


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_file_says_its_job(path: Path) -> None:
    """Every file has a docstring that says its job in one sentence."""
    assert ast.get_docstring(ast.parse(path.read_text()))


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


def test_questions_start_no_mpi() -> None:
    """What a program may ask before ``init_process_group`` neither imports MPI nor starts it.

    A child process of a rank has to be refused before MPI starts, which it would wait for without end.
    """
    source = """
        import sys, mpicoll
        import mpicoll.groups.registry, mpicoll.lifecycle.init
        asked = mpicoll.is_initialized(), mpicoll.is_available()
        print(asked, "mpi4py.MPI" in sys.modules)
    """
    assert in_fresh_python(source) == "(False, True) False"


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
    assert users == [PACKAGE / "memory" / "device" / "cuda.py"]


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
