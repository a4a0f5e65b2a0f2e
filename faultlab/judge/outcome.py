"""How the run ended, per rank and for the group: the first word that applies.

Promise: an outcome is what was seen, whoever is to blame: ``crash``, ``hang``,
``disagree``, ``undeclared-error``, ``wrong-result``, ``error``, ``fallback``,
``used``. Ranks that the scenario took out, or cut off from their group, keep an
outcome of their own and do not speak for the group while others are left. A
new outcome is a new word in ``scenario.models.Outcome`` and a line in ``_of``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, get_args

from faultlab.judge.decisions import comparisons, survivors
from faultlab.judge.facts import Facts, RankFacts
from faultlab.judge.paths import final_path, first_rung
from faultlab.scenario.models import Outcome

#: In the order of the design: the first that applies.
ORDER: Final[tuple[Outcome, ...]] = get_args(Outcome)


@dataclass(frozen=True)
class RankOutcome:
    """One rank's own end."""

    rank: int
    outcome: Outcome | None
    path: str | None


@dataclass(frozen=True)
class GroupOutcome:
    """The group's end; no outcome if no rank began a step. ``speaking``: the ranks whose outcome and
    path must match what is expected."""

    outcome: Outcome | None
    path: str | None
    ranks: tuple[RankOutcome, ...]
    speaking: tuple[int, ...]


def outcome_of(facts: Facts) -> GroupOutcome:
    """The outcome of a run."""
    each = tuple(RankOutcome(rank.rank, _of(facts, rank), final_path(rank)) for rank in facts.ranks)
    alive = [each[rank.rank] for rank in facts.judged] or list(each)
    asked = [each[rank.rank] for rank in survivors(facts)] or list(each)
    paths = {rank.path for rank in asked}
    return GroupOutcome(
        _group(facts, alive, asked),
        next(iter(paths)) if len(paths) == 1 else None,
        each,
        tuple(rank.rank for rank in asked),
    )


def _group(facts: Facts, alive: list[RankOutcome], asked: list[RankOutcome]) -> Outcome | None:
    ended = _first(alive)
    if ended in ("crash", "hang"):
        return ended
    if any(each.split for each in comparisons(facts)):
        return "disagree"
    return _first(asked)


def _first(ranks: list[RankOutcome]) -> Outcome | None:
    seen = {rank.outcome for rank in ranks}
    return next((outcome for outcome in ORDER if outcome in seen), None)


def _of(facts: Facts, rank: RankFacts) -> Outcome | None:
    if rank.ended is not None:
        return "hang" if rank.ended.how == "hung" else "crash"
    if rank.crash is not None:
        return "crash"
    if rank.hung is not None:
        return "hang"
    if not rank.steps:
        return None
    errors = [step.error for step in rank.steps if step.error is not None]
    if not all(error.declared for error in errors):
        return "undeclared-error"
    if not all(use.correct for use in rank.uses):
        return "wrong-result"
    if errors:
        return "error"
    carried = final_path(rank) or created_rung(rank)
    return "used" if carried in (None, first_rung(facts.scenario)) else "fallback"


def created_rung(rank: RankFacts) -> str | None:
    """The rung that the last create settled on; None if none did, or an object does not say."""
    for step in reversed(rank.steps):
        if step.name == "create" and step.returned in ("object", "none"):
            return "none" if step.returned == "none" else step.backend
    return None
