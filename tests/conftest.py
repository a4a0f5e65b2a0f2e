"""Helpers that the tests share: running scenarios, and looking for leftovers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from faultlab.judge import judge_facts
from faultlab.report.results import result_object
from faultlab.runner.counterfactuals import completed
from faultlab.scenario.load import load_file

REPOSITORY = Path(__file__).resolve().parent.parent
pytest_plugins = ["pytester"]


def broken(result: dict[str, Any]) -> set[str]:
    """The invariants that a result calls broken."""
    return {name for name, found in result["invariants"].items() if found["state"] == "broken"}


@pytest.fixture
def write_scenario(tmp_path: Path) -> Callable[..., Path]:
    """Write a scenario file into the test's folder."""

    def write(text: str, name: str = "case.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture
def run_text(
    faultlab_session: Any, write_scenario: Callable[..., Path], tmp_path: Path
) -> Iterator[Callable[..., Any]]:
    """Run the one scenario of a text: its result, and the folder of its events."""
    folders: list[Path] = []

    def run(text: str) -> tuple[dict[str, Any], Path]:
        (scenario,) = load_file(write_scenario(text))
        folder = faultlab_session.run(scenario)
        folders.append(folder)
        return result_object(judge_facts(completed(faultlab_session, folder)), folder), folder

    yield run
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
