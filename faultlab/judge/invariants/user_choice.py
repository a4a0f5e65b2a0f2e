"""``user_choice``: an explicit back end is used or refused with a declared error, never silently replaced.

Promise: where the scenario names a back end, every create gives an object of
that back end or raises a declared error, and every all-reduce is carried by it.
``auto`` and ``preferred`` are no orders, and say nothing here.
"""

from __future__ import annotations

from faultlab.judge.facts import Facts, RankFacts
from faultlab.judge.finding import HELD, Finding, broken, not_checked
from faultlab.judge.paths import paths_of


def check(facts: Facts) -> Finding:
    """Whether the user's order was kept or refused in the open."""
    ordered = facts.scenario.workspace.backend
    if ordered == "auto":
        return not_checked("the scenario orders no back end")
    asked = 0
    for rank in facts.judged:
        problem = _replaced(rank, ordered)
        if problem is not None:
            return problem
        asked += sum(1 for step in rank.steps if step.name == "create" and step.ended is not None)
    return HELD if asked else not_checked("no create came to its end")


def _replaced(rank: RankFacts, ordered: str) -> Finding | None:
    carried = paths_of(rank)
    for step in rank.steps:
        if step.ended is None:
            continue
        where = f"rank {rank.rank}: {ordered} was ordered, and {step.title}"
        if step.error is not None and step.name in ("create", "use") and not step.error.declared:
            return broken(f"{where} raised {step.error.title}, which is not declared", step.ended)
        if step.returned == "none":
            return broken(f"{where} returned none without an error", step.ended)
        if step.returned == "object" and step.backend != ordered:
            return broken(f"{where} gave {step.backend}", step.ended)
        others = [path for path in carried.get(step.index, ()) if path is not None and path != ordered]
        if others:
            return broken(f"{where} was carried by {others[0]}", step.ended)
    return None
