"""Every canary breaks exactly what it declares: no oracle is blind, and none sees too much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from faultlab.judge import judge
from faultlab.judge.finding import HELD
from faultlab.judge.registry import CHECKS
from faultlab.subjects.canaries import CANARIES
from tests.conftest import broken

pytestmark = pytest.mark.sim

PLAIN = {
    "faultlab": 1,
    "title": "a canary",
    "topology": "hgx-h100-8",
    "ranks": 2,
    "workspace": {"creation": "mocked"},
}


@pytest.mark.parametrize("name", sorted(CANARIES))
def test_a_canary_breaks_exactly_what_it_declares(
    name: str, run_text: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = CANARIES[name]
    result, folder = run_text(yaml.safe_dump({**PLAIN, **canary.scenario, "subject": f"canary:{name}"}))
    assert result["verdict"] == "fail", result["reason"]
    assert broken(result) == canary.breaks
    assert name.split("-")[0] in canary.breaks
    # The same recording with an oracle switched off: the comparison above would fail.
    for invariant in canary.breaks:
        with monkeypatch.context() as patch:
            patch.setitem(CHECKS, invariant, lambda facts: HELD)
            assert set(judge(folder).broken) == canary.breaks - {invariant}


@pytest.mark.parametrize("name", sorted(CANARIES))
def test_the_reference_breaks_nothing_where_a_canary_does(name: str, run_text: Callable[..., Any]) -> None:
    result, _ = run_text(yaml.safe_dump({**PLAIN, **CANARIES[name].scenario, "subject": "reference"}))
    assert result["verdict"] == "pass", result["reason"]


def test_every_invariant_that_is_built_has_a_canary() -> None:
    assert {name.split("-")[0] for name in CANARIES} == set(CHECKS)
