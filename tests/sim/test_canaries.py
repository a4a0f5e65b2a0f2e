"""Every canary breaks exactly what it declares: no oracle is blind, and none sees too much.

Each canary runs once, on its own seed, as ``faultlab run scenarios/seed --subject
canary:NAME -k SEED`` runs it. What was recorded is then judged again with oracles that
are broken on purpose, and the same comparison must notice each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from faultlab.judge import judge
from faultlab.judge.facts import Facts
from faultlab.judge.finding import HELD, Finding
from faultlab.judge.finding import broken as broken_finding
from faultlab.judge.registry import CHECKS
from faultlab.report import text
from faultlab.runner.batch import items_of, run_item
from faultlab.scenario.load import load_paths
from faultlab.scenario.models import Scenario
from faultlab.subjects.canaries import CANARIES
from tests.conftest import REPOSITORY, broken

pytestmark = pytest.mark.sim

#: With fewer, an oracle may be right by luck.
CANARIES_PER_INVARIANT = 2


@dataclass(frozen=True)
class Recorded:
    """One run of a canary, or of the reference, on a seed."""

    name: str
    result: dict[str, Any]
    folder: Path


def invariant_of(name: str) -> str:
    """The invariant that a canary is named for."""
    return name.partition("-")[0]


def own_canaries(invariant: str) -> list[str]:
    """The canaries that are named for an invariant."""
    return [name for name in CANARIES if invariant_of(name) == invariant]


def difference(folder: Path, declared: frozenset[str]) -> frozenset[str]:
    """Where the oracles and a declared set differ on a recording; empty is what is wanted."""
    return frozenset(judge(folder).broken) ^ declared


@pytest.fixture(scope="module")
def seeds() -> dict[str, Scenario]:
    """The seed scenarios by their ids."""
    return {scenario.id: scenario for scenario in load_paths([REPOSITORY / "scenarios" / "seed"])}


@pytest.fixture(scope="module")
def record(
    faultlab_session: Any, seeds: dict[str, Scenario], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Recorded]:
    """Runs a subject on a seed, as ``--subject`` does, and keeps what it recorded."""

    def run(subject: str, seed: str) -> Recorded:
        (item,) = items_of([seeds[seed]], ("sim",), subject)
        out = tmp_path_factory.mktemp("recorded")
        return Recorded(subject, run_item(faultlab_session, item, out), out / item.id)

    return run


# The parameters of a module's fixture keep the tests of one recording together.


@pytest.fixture(scope="module", params=sorted(CANARIES))
def canary(request: pytest.FixtureRequest, record: Callable[[str, str], Recorded]) -> Recorded:
    """A canary's one run."""
    return replace(record(f"canary:{request.param}", CANARIES[request.param].seed), name=request.param)


@pytest.fixture(scope="module", params=sorted({canary.seed for canary in CANARIES.values()}))
def reference(request: pytest.FixtureRequest, record: Callable[[str, str], Recorded]) -> Recorded:
    """The reference's one run on a seed that shows a canary."""
    return record("reference", request.param)


def test_a_canary_breaks_exactly_what_it_declares(canary: Recorded) -> None:
    declared = CANARIES[canary.name].breaks
    assert canary.result["verdict"] == "fail", canary.result["reason"]
    assert broken(canary.result) == declared
    assert not difference(canary.folder, declared)
    assert invariant_of(canary.name) in declared
    # What a person sees of it: the exit status, and the invariant by its name.
    assert text.exit_code([canary.result]) == 1
    assert all(invariant in text.render_result(canary.result) for invariant in declared)


def test_an_oracle_that_is_switched_off_is_noticed(canary: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = CANARIES[canary.name].breaks
    for invariant in declared:
        with monkeypatch.context() as patch:
            patch.setitem(CHECKS, invariant, lambda facts: HELD)
            assert difference(canary.folder, declared) == {invariant}


def test_an_oracle_that_is_inverted_is_noticed(canary: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = CANARIES[canary.name].breaks
    for invariant in declared:
        with monkeypatch.context() as patch:
            patch.setitem(CHECKS, invariant, inverted(CHECKS[invariant]))
            assert difference(canary.folder, declared) == {invariant}


def test_the_reference_breaks_nothing_where_a_canary_does(reference: Recorded) -> None:
    assert reference.result["verdict"] == "pass", reference.result["reason"]
    assert not difference(reference.folder, frozenset())


def test_inverted_oracles_see_all_that_the_reference_held(
    reference: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {name for name in CHECKS if reference.result["invariants"][name]["state"] == "held"}
    assert held
    for invariant in CHECKS:
        monkeypatch.setitem(CHECKS, invariant, inverted(CHECKS[invariant]))
    assert difference(reference.folder, frozenset()) == held


def inverted(check: Callable[[Facts], Finding]) -> Callable[[Facts], Finding]:
    """The check with held and broken exchanged."""

    def invert(facts: Facts) -> Finding:
        finding = check(facts)
        if finding.state == "broken":
            return HELD
        return broken_finding("inverted", facts.ranks[0].last) if finding.state == "held" else finding

    return invert


# ----------------------------------------------------------- the declarations


@pytest.mark.parametrize("invariant", list(CHECKS))
def test_an_invariant_has_canaries_enough(invariant: str) -> None:
    assert len(own_canaries(invariant)) >= CANARIES_PER_INVARIANT


@pytest.mark.parametrize("name", sorted(CANARIES))
def test_a_declaration_is_complete(name: str, seeds: dict[str, Scenario]) -> None:
    canary = CANARIES[name]
    assert invariant_of(name) in CHECKS
    assert canary.seed in seeds
    assert invariant_of(name) in canary.breaks
    assert canary.breaks | canary.also_breaks <= set(CHECKS)
    assert not canary.breaks & canary.also_breaks
    assert canary.__doc__ and "(" in canary.__doc__, "it says where users met it"
