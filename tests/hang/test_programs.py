"""The corpus of buggy and of correct programs: what is wrong ends soon with a message that explains it, the rest ends well.

What must come of each program stands in its docstring, see ``corpus``; ``python tests/support/corpus.py`` prints the score.
"""

from __future__ import annotations

import corpus
import pytest
from jobs import family

FAST = {
    "arguments/a_list_instead_of_an_array",
    "arguments/count",
    "asynchronous/issue_order",
    "correct/gradient_hooks",
    "correct/two_groups_asynchronously",
    "groups/each_its_own",
    "leaving/sys_exit_with_a_code",
    "missing/uneven_last_batch",
    "objects/does_not_pickle",
    "order/checkerboard",
    "point_to_point/halo_at_the_edge",
    "zero_first/collective_inside",
}
"""Run by ``make test``, one of each kind; the others by ``make test-all``."""


NOT_YET: dict[str, str] = {}
"""Programs with which the library does not deal as it must so far, and why; whoever changes that takes them out."""

LAUNCHER = "MPICH's launcher kills or signals the ranks that are left when one has died, before they can raise"

SOMETIMES = {
    "leaving/hard_exit": LAUNCHER,
    "leaving/hard_exit_zero": LAUNCHER,
}
"""The same, of programs where it is a matter of luck, on MPICH."""


def _parameter(program: corpus.Program) -> object:
    marks = [] if program.name in FAST else [pytest.mark.slow]
    if program.name in NOT_YET:
        marks.append(pytest.mark.xfail(reason=NOT_YET[program.name], strict=True))
    if program.name in SOMETIMES and family() == "mpich":
        marks.append(pytest.mark.xfail(reason=SOMETIMES[program.name], strict=False))
    return pytest.param(program, id=program.name, marks=marks)


@pytest.mark.parametrize("program", [_parameter(program) for program in corpus.programs()])
def test_program(program: corpus.Program) -> None:
    """An erroneous program ends with an error that explains it on every rank involved; a correct one is left alone."""
    score, _ = corpus.run(program)
    assert score.good, f"{program.title} {score.letters()}: {score.why}"


def test_lists() -> None:
    """The lists above name programs that are there."""
    names = {program.name for program in corpus.programs()}
    assert names >= FAST
    assert names >= NOT_YET.keys() | SOMETIMES.keys()
    assert not FAST & (NOT_YET.keys() | SOMETIMES.keys())
