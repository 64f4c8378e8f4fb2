"""The public surface is torch's: names, parameters, order and defaults; and the generated pages are up to date."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import load

import mpicoll
from mpicoll import errors
from mpicoll.diagnosis.report import advice, report, texts
from mpicoll.launch import wrong_starts

ROOT = Path(__file__).resolve().parent.parent.parent
generate = load(ROOT / "docs" / "generate.py")
FUNCTIONS = [
    name
    for name, parameters in generate.torch_names().items()
    if parameters not in (None, "...") and name in mpicoll.__all__ and inspect.isfunction(getattr(mpicoll, name))
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_parameters_are_torchs(name: str) -> None:
    """Every function has torch's parameters in torch's order with torch's defaults; ours come keyword-only after them."""
    ours = generate.parameters(getattr(mpicoll, name))
    theirs = generate.torch_names()[name]
    extra = "*" in ours and "*" not in theirs.split(", ")
    positional = ours[: ours.index("*")] if extra else ours
    assert ", ".join(positional) == theirs


def test_there_are_functions_to_compare() -> None:
    """The comparison above is not empty."""
    assert len(FUNCTIONS) > 30


def test_generated_pages_are_up_to_date() -> None:
    """docs/api.md, docs/messages.md and the tables of README.md are those of the code (python docs/generate.py writes them)."""
    assert (ROOT / "docs" / "api.md").read_text() == generate.api_page()
    assert (ROOT / "docs" / "messages.md").read_text() == generate.messages_page()
    assert (ROOT / "README.md").read_text() == generate.readme()


def test_messages_say_when_they_come_and_what_to_do() -> None:
    """Each class of errors says so itself, and each message of reports and wrong starts."""
    classes = [getattr(errors, name) for name in errors.__all__ if inspect.isclass(getattr(errors, name))]
    assert len(classes) == 14
    for each in classes:
        assert each.__doc__, each
        assert each.__dict__["what_to_do"], each
    for module, whole in ((texts, True), (report, False), (advice, False), (wrong_starts, True)):
        found = [value for value in vars(module).values() if isinstance(value, errors.Message)]
        assert len(found) > 8, module
        assert all(each.text and each.when and (each.what_to_do or not whole) for each in found), module


def test_every_public_function_is_documented() -> None:
    """Each public function and class has a docstring, and each function that torch has names it as its source."""
    for name in mpicoll.__all__:
        value = getattr(mpicoll, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            assert inspect.getdoc(value), name
    for name in FUNCTIONS:
        assert "torch.distributed" in (inspect.getdoc(getattr(mpicoll, name)) or ""), name


def test_no_mpi_library() -> None:
    """``is_mpi_available()`` says whether mpi4py is installed; the start says that no MPI library could be loaded."""
    program = """
import mpicoll as dist
assert dist.is_mpi_available()
try:
    dist.init_process_group()
except dist.LaunchError as error:
    assert "no MPI could be loaded" in str(error)
    print("told")
"""
    environment = {**os.environ, "MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "told"), done
