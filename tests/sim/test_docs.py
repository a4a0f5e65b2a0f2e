"""Every command in the README and the docs is run, as it stands there."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

pytestmark = [pytest.mark.sim, pytest.mark.slow]

#: CI runs these themselves, from a fresh clone: this test is a part of the second.
_RUN_BY_CI = {"make demo", "make test"}


def commands() -> list[str]:
    """The lines of fenced blocks that are commands, in the order of the pages."""
    found = []
    for page in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]:
        fenced = False
        for line in page.read_text().splitlines():
            if line.startswith("```"):
                fenced = not fenced
            elif fenced and line.startswith((".venv/bin/", "make ")):
                found.append(line)
    return found


def test_the_docs_have_commands_and_ci_runs_the_make_targets() -> None:
    assert set(commands()) >= _RUN_BY_CI
    assert len(commands()) >= 12
    ci = (REPOSITORY / ".ci" / "run").read_text()
    assert all(command in ci for command in _RUN_BY_CI)


def test_every_command_in_the_docs_runs(tmp_path: Path) -> None:
    """In one test, in order: a later command may read what an earlier one wrote."""
    shutil.copytree(REPOSITORY / "scenarios", tmp_path / "scenarios")
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    shutil.copytree(REPOSITORY / "benchmarks", tmp_path / "benchmarks")
    (tmp_path / "tests").mkdir()
    for command in commands():
        if command in _RUN_BY_CI:
            continue
        words = shlex.split(command)
        program = {"faultlab": ["-m", "faultlab.cli"], "python": []}[Path(words[0]).name]
        done = subprocess.run(
            [sys.executable, *program, *words[1:]],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
    assert (tmp_path / "faultlab-out" / "results.jsonl").exists()
