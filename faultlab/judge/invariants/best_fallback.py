"""``best_fallback``: no higher rung would have worked.

Promise: for every rung that a group passed by on its way down, and that the machine
supports without faults, a counterfactual run of it alone (``judge.counterfactual``: same
machine, ranks, faults and budget, ordered by name, the subject ``reference``) is read
from the run's folder. Broken if one of them ended in ``used`` and broke nothing.

A counterfactual is no evidence against the subject where it did not meet the same
faults. A fault that names which calls it strikes (``calls``: a number, a list, ``from``,
``chance``) counts calls, and another sequence of calls may slip past it: if it struck while the
subject set up, it must strike the same ranks there, or the rung is left ``not-checked``.
A fault that strikes every call is met by whoever makes the call; who makes none of
them on a rung has a rung that the fault does not concern. That a transient fault
strikes the counterfactual too, so that the rung is not used there, speaks for the subject.

Not judged: an order of the user, a subject without a ladder of its own, groups that
crashed, hung, split, raised or lost a rank, and uses that a good workspace did not carry.
"""

from __future__ import annotations

from typing import Final

from faultlab.judge import wording
from faultlab.judge.counterfactual import SUBJECT, needed, settled, why_none
from faultlab.judge.facts import Facts
from faultlab.judge.finding import HELD, Finding, at_step, broken, not_checked
from faultlab.judge.records import Counterfactual

_SET_UP: Final = ("create", "use", "collective", "capture")


def check(facts: Facts) -> Finding:
    """Whether the group ended on the best rung that its faults left."""
    reason = why_none(facts)
    if reason:
        return not_checked(reason)
    undecided = ""
    for rung in needed(facts):
        alone = facts.counterfactuals.get(rung)
        if alone is None:
            undecided = undecided or f"whether {rung} alone would have worked was not tried"
        elif alone.unknown:
            undecided = undecided or f"whether {rung} alone would have worked is unknown: {alone.unknown}"
        elif alone.outcome == "used" and not alone.broken:
            missed = _missed(facts, rung, alone)
            if not missed:
                return broken(_needless(facts, rung), at_step(_last_create(facts)))
            undecided = undecided or missed
    return not_checked(undecided) if undecided else HELD


def _needless(facts: Facts, rung: str) -> str:
    return (
        f"the group settled on {settled(facts)}, and {rung} works under the same faults "
        f"({SUBJECT}, with {rung} ordered, used it with a correct result)"
    )


def _missed(facts: Facts, rung: str, alone: Counterfactual) -> str:
    """Which fault that counts calls struck the subject and not the counterfactual; empty if none."""
    for index, fault in enumerate(facts.scenario.faults):
        if fault.calls == "every" or fault.during not in ("any", "preflight", rung):
            continue
        struck = _struck_in_set_up(facts, index)
        spared = struck - alone.fired.get(index, frozenset())
        if spared:
            return (
                f"{rung} alone worked, but fault {index} at {fault.at}, which counts calls, "
                f"did not strike {wording.ranks(spared)} there"
            )
    return ""


def _struck_in_set_up(facts: Facts, fault: int) -> set[int]:
    steps = {step.index for rank in facts.ranks for step in rank.steps if step.name in _SET_UP}
    return {
        rank.rank
        for rank in facts.ranks
        for strike in rank.strikes
        if strike.fault == fault and strike.moment.step in steps
    }


def _last_create(facts: Facts) -> int:
    return max(
        (step.index for rank in facts.ranks for step in rank.steps if step.name == "create"), default=0
    )
