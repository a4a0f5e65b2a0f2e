"""The benchmark of the canaries says where a declaration is not true."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest

from faultlab.subjects.canaries import CANARIES
from tests.conftest import REPOSITORY

NAME = "ranks_agree-falls-back-alone"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("canaries", REPOSITORY / "benchmarks" / "canaries.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclass looks its own module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def result(*broken: str, verdict: str = "fail") -> dict[str, Any]:
    """A result with these invariants broken."""
    return {
        "id": "some[case=a]-sim",
        "verdict": verdict,
        "invariants": {name: {"state": "broken", "reason": "why"} for name in broken},
    }


def seen(benchmark: ModuleType, own: dict[str, Any], *others: dict[str, Any]) -> list[str]:
    """What is said of a canary after these runs."""
    runs = benchmark.Seen()
    runs.add(own, own=True)
    for other in others:
        runs.add(other, own=False)
    return list(benchmark.contradictions(NAME, runs))


def test_a_true_declaration_is_not_contradicted(benchmark: ModuleType) -> None:
    own, also = CANARIES[NAME].breaks, CANARIES[NAME].also_breaks
    assert also
    assert seen(benchmark, result(*own), result(*own, *also), result()) == []


def test_less_or_more_on_its_own_seed_is_told(benchmark: ModuleType) -> None:
    own = sorted(CANARIES[NAME].breaks)
    for broken in ((), own[:1], (*own, *CANARIES[NAME].also_breaks)):
        (told,) = seen(benchmark, result(*broken))
        assert told.startswith(f"on {CANARIES[NAME].seed} it breaks")


def test_what_is_not_declared_is_told_wherever_it_is_seen(benchmark: ModuleType) -> None:
    told = seen(benchmark, result(*CANARIES[NAME].breaks), result("no_leak"))
    assert told == ["no_leak is not declared; some[case=a]-sim: why"]


def test_an_unknown_run_shows_nothing(benchmark: ModuleType) -> None:
    own = CANARIES[NAME].breaks
    assert seen(benchmark, result(*own), result("no_leak", verdict="unknown")) == []
    assert seen(benchmark, result(*own, verdict="unknown")) == [
        f"its own seed {CANARIES[NAME].seed} ended unknown"
    ]
