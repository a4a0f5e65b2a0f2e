"""The pytest plugin: scenario files are collected; one item per scenario and lane.

Items are marked ``sim`` or ``gpu``, stand at their line in their file, and are
run by one session of the lab per pytest process, started at the first item
that needs it. A failing item shows the cause on its first line; ``unknown``
fails with that word; ``skipped`` skips with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from faultlab.errors import FaultlabError, ScenarioError

MARKS = {
    "sim": "scenarios and tests on the simulated machine (CPU only)",
    "gpu": "scenarios on real GPUs",
    "env": "needs an environment of its own for its subject",
    "slow": "end-to-end tests that take more than a few seconds",
}


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks and the place of this process's session."""
    for name, meaning in MARKS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    config.stash[_SESSION] = None


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Scenario files are those whose top key is ``faultlab:``."""
    if file_path.suffix not in (".yaml", ".yml"):
        return None
    from faultlab.scenario.load import is_scenario_file

    if not is_scenario_file(file_path):
        return None
    collected: pytest.Collector = ScenarioFile.from_parent(parent, path=file_path)
    return collected


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the session, if one was started."""
    session = config.stash.get(_SESSION, None)
    if session is not None:
        session.close()
        config.stash[_SESSION] = None


class ScenarioFile(pytest.File):
    """A file of scenarios."""

    def collect(self) -> Iterator[pytest.Item]:
        """One item per scenario and lane. A wrong file is an error of this file alone."""
        from faultlab.runner.batch import items_of
        from faultlab.scenario.load import load_file

        try:
            scenarios = load_file(self.path)
        except ScenarioError as error:
            raise self.CollectError(str(error)) from None
        for item in items_of(scenarios, ("sim", "gpu")):
            yield ScenarioItem.from_parent(self, name=item.id, item=item)


class ScenarioFailure(Exception):
    """A verdict that is not a pass; the text is what a person reads."""


class ScenarioItem(pytest.Item):
    """One scenario in one lane."""

    def __init__(self, *, item: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._item = item
        self.add_marker(getattr(pytest.mark, item.lane))

    def runtest(self) -> None:
        """Run and judge. Raises ScenarioFailure unless it passes; skips with the reason."""
        from faultlab.report.text import render_result
        from faultlab.runner.batch import run_item, skip_reason

        reason = skip_reason(self._item)
        if reason:
            pytest.skip(reason)
        result = run_item(lab_session(self.config), self._item)
        for key in ("verdict", "outcome", "path", "replay"):
            self.user_properties.append((key, str(result[key])))
        if result["verdict"] != "pass":
            raise ScenarioFailure(render_result(result))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The lab's own text for a verdict or an error of the lab; a traceback only for a bug."""
        if isinstance(excinfo.value, (ScenarioFailure, FaultlabError)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        """The scenario's own file and line."""
        return self.path, max(self._item.scenario.line - 1, 0), self.name


_SESSION: pytest.StashKey[Any] = pytest.StashKey()


def lab_session(config: pytest.Config) -> Any:
    """This pytest process's session of the lab; started when first asked for."""
    from faultlab.runner.session import Session

    session = config.stash[_SESSION]
    if session is None:
        session = Session()
        config.stash[_SESSION] = session
    return session


@pytest.fixture(scope="session")
def faultlab_session(pytestconfig: pytest.Config) -> Any:
    """The lab's session of this pytest process (``faultlab.runner.session.Session``)."""
    return lab_session(pytestconfig)
