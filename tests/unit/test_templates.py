"""The batch scripts of ``slurm/``: what is the same in all of them, and that they say what they take. No Slurm."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "slurm"
TEMPLATES = sorted(FOLDER.glob("*.sbatch"))

HEAD = re.compile(r"#!/bin/bash\n((?:#(?!SBATCH).*\n)+)((?:##?SBATCH.*\n)+)")
GIVEN = {"PWD", "SLURM_ARRAY_TASK_ID", "SLURM_JOB_NAME", "SLURM_JOB_NODELIST", "SLURM_JOB_ID", "SLURM_NTASKS"}
GIVEN |= {"SLURM_CPUS_PER_TASK", "SLURM_RESTART_COUNT", "PMIX_SERVER_TMPDIR", "PMIX_MCA_psec"}


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_template(path: Path) -> None:
    """Its options come first, its variables are told in its head, srun ends it with a failing rank, and bash can read it."""
    text = path.read_text()
    assert max(map(len, text.splitlines())) <= 130
    head = HEAD.match(text)
    assert head is not None
    comment, options = head.groups()
    body = text[head.end() :]
    assert "#SBATCH" not in body.replace("##SBATCH", "")
    assert f"slurm/{path.name}" in comment, "no line to submit it with"
    assert f"#SBATCH --job-name={path.stem}\n" in options
    assert re.search(r"^#SBATCH --output=%x-(%j|%A-%a)\.out$", options, re.MULTILINE)
    code = "".join(line for line in body.splitlines(keepends=True) if not line.startswith("#"))
    used = set(re.findall(r"\$\{?([A-Z][A-Z_0-9a-z]+)", code)) - GIVEN
    told = set(re.findall(r"^#   ([A-Z_]+) ", comment, re.MULTILINE))
    assert used - {"VENV", "PYTHON"} == told - {"VENV", "PYTHON"}
    assert re.search(r"^set -eo pipefail$(?s:.*)^set -u$", code, re.MULTILINE)
    for line in code.splitlines():
        if re.match(r"(exec )?srun ", line):
            assert "srun --kill-on-bad-exit=1 --mpi=" in line
    assert "srun " in code or '"$MPIRUN"' in code
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=20)


def test_the_same_words() -> None:
    """What several scripts share is the same in all of them."""
    texts = [path.read_text() for path in TEMPLATES if "import mpicoll" in path.read_text()]
    checks = [text[text.index("set -eo") : text.index("import mpicoll")] for text in texts]
    assert len(checks) == 8
    checks = [re.sub(r"SCRIPT:-[\w/.]+", "SCRIPT:-…", check) for check in checks]
    assert len(set(checks)) == 1


def test_table() -> None:
    """slurm/README.md lists every script."""
    listed = re.findall(r"\| \[`([\w-]+)\.sbatch`\]\(\1\.sbatch\) \|", (FOLDER / "README.md").read_text())
    assert sorted(listed) == [path.stem for path in TEMPLATES]
