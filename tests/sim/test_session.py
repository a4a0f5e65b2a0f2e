"""A session's own life."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from faultlab.judge import judge
from faultlab.runner.session import Session
from faultlab.scenario.load import load_paths

pytestmark = pytest.mark.sim


def test_the_forkserver_outlives_the_thread_that_asked_for_it(write_scenario: Callable[..., Path]) -> None:
    path = write_scenario(
        "faultlab: 1\ntitle: plain\ntopology: pcie-4\nranks: 2\nsubject: reference\nworkspace: {creation: mocked}\n"
    )
    with Session() as session:
        asking = threading.Thread(target=session.warm_up)
        asking.start()
        asking.join()
        assert judge(session.run(load_paths([path])[0])).verdict.word == "pass"
