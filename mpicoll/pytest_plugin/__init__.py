"""Run tests on several ranks: a test fails on all ranks, with the failing rank's output, instead of hanging.

Load the plugin in the top ``conftest.py`` of a test suite, install ``pytest-mpi`` for its marks, and start several ranks::

    # conftest.py
    pytest_plugins = ["mpicoll.pytest_plugin"]

    @pytest.fixture(autouse=True, scope="session")
    def ranks():
        dist.init_process_group()
        yield
        dist.destroy_process_group()

    # test_sum.py
    @pytest.mark.mpi(min_size=2)
    @pytest.mark.mpi_timeout(10)
    def test_sum():
        x = np.ones(4)
        dist.all_reduce(x)
        assert (x == dist.get_world_size()).all()

    $ mpicoll run -n 4 -m pytest --with-mpi

Then

- the ranks exchange how each phase of a test (setup, call, teardown) ended. A phase that failed on one rank is a failure
  on all of them; rank 0, the only rank that prints, shows the assertion of the rank that failed;
- ranks that disagree (one skips, another passes) fail the test, and ranks that collected different tests end at once;
- a test that exceeds its limit (``--mpi-timeout``, ini ``mpi_timeout``, the mark; 60 s; a third of the limit after a rank
  has failed) ends the job with a nonzero exit code. The failures so far are printed first, as pytest prints them at its end.
  The report has the test's name, the ranks that had finished the test, the call of mpicoll that each rank waits in and for
  how long, and every rank's stack. `mpicoll run` blames no rank for the end of the job;
- ``collective_raises`` asserts that a block raises on every rank. ``pytest.raises`` would let a rank on which nothing is
  raised continue without the other ranks::

      from mpicoll.pytest_plugin import collective_raises

      with collective_raises(dist.CollectiveMismatchError, match="all_reduce"):
          dist.all_reduce(np.ones(1 + dist.get_rank()))

- only rank 0 writes the JUnit report.

The plugin is not a ``pytest11`` entry point. Every pytest of the environment loads such a plugin: it would import numpy and
this package before coverage measurement starts, and change the verdicts of other projects' suites. Without pytest-mpi's
``--with-mpi`` or ``--only-mpi`` the loaded plugin does nothing, and imports nothing of MPI.
"""

from __future__ import annotations

import importlib.metadata

import pytest

from mpicoll.pytest_plugin.hooks import MultiRank
from mpicoll.pytest_plugin.raises import CollectiveInfo, collective_raises

__all__ = ["CollectiveInfo", "collective_raises"]

DEFAULT_LIMIT = 60.0


def _installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the limit of a test as an option and as an ini value."""
    group = parser.getgroup("mpicoll")
    text = f"seconds that one test may take on several ranks before the job is ended (default: {DEFAULT_LIMIT:g})"
    group.addoption("--mpi-timeout", type=float, default=None, dest="mpi_timeout", metavar="SECONDS", help=text)
    parser.addini("mpi_timeout", text, default=str(DEFAULT_LIMIT))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Start the exchange between the ranks if pytest-mpi's options ask for tests on several ranks."""
    config.addinivalue_line("markers", "mpi_timeout(seconds): the limit of this test on several ranks")
    if _installed("mpi-pytest") and _installed("pytest-mpi"):
        raise pytest.UsageError(
            "pytest-mpi and mpi-pytest are both installed, and both install the module pytest_mpi. "
            "Keep pytest-mpi: pip uninstall -y mpi-pytest pytest-mpi && pip install pytest-mpi"
        )
    if config.getoption("--with-mpi", default=False) or config.getoption("--only-mpi", default=False):
        config.pluginmanager.register(MultiRank(config), "mpicoll-multi-rank")
