"""Every command in the README and the docs is run, as it stands there."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

pytestmark = [pytest.mark.sim, pytest.mark.slow]

_BLOCK = re.compile(r"^```\n(.*?)^```", re.DOTALL | re.MULTILINE)
#: CI runs these themselves, from a fresh clone: this test is a part of the second.
_RUN_BY_CI = {"make demo", "make test"}


def commands() -> list[str]:
    found = []
    for page in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]:
        for block in _BLOCK.findall(page.read_text()):
            found += [line for line in block.splitlines() if line.startswith((".venv/bin/", "make "))]
    return found


def test_the_docs_have_commands_and_ci_runs_the_make_targets() -> None:
    assert set(commands()) >= _RUN_BY_CI
    ci = (REPOSITORY / ".ci" / "run").read_text()
    assert all(command in ci for command in _RUN_BY_CI)


def test_every_command_in_the_docs_runs(tmp_path: Path) -> None:
    """In one test, in order: a later command may read what an earlier one wrote."""
    for name in ("scenarios", "faultlab", "tests", "conftest.py", "pyproject.toml"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    for command in commands():
        if command in _RUN_BY_CI:
            continue
        words = shlex.split(command)
        program = {"faultlab": ["-m", "faultlab.cli"], "python": []}[Path(words[0]).name]
        done = subprocess.run(
            [sys.executable, *program, *words[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
    shutil.rmtree(tmp_path / "faultlab-out")
