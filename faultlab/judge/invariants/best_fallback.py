"""``best_fallback``: no higher rung would have worked.

Promise: for every rung that a group passed by on its way down, and that the machine
supports without faults, a counterfactual run of it alone (``judge.counterfactual``: same
machine, ranks, faults and budget, ordered by name, the subject ``reference``) is read
from the run's folder. Broken if one of them ended in ``used`` and broke nothing.

A counterfactual that worked is no evidence against the subject where a fault that
counts calls (``calls``: a number, a list, ``from``, ``chance``) struck while the subject set up.
Another sequence of calls may slip past it, or meet it at a call that is made again (FlashInfer
connects until the peer listens), and a subject that gave up remembers: nobody may ask it
to try once more. Such a rung is left ``not-checked``, unless the fault's ``during`` names another
rung. A fault that strikes every call is met by whoever makes the call; who makes none of
them on a rung has a rung that the fault does not concern. That a counting fault strikes the
counterfactual too, so that the rung is not used there, speaks for the subject.

Not judged: an order of the user, a subject without a ladder of its own, groups that
crashed, hung, split, raised or lost a rank, and uses that a good workspace did not carry.
"""

from __future__ import annotations

from typing import Final

from faultlab.judge import wording
from faultlab.judge.counterfactual import SUBJECT, needed, settled, why_none
from faultlab.judge.facts import Facts
from faultlab.judge.finding import HELD, Finding, at_step, broken, not_checked

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
            missed = _missed(facts, rung)
            if not missed:
                return broken(_needless(facts, rung), at_step(_last_create(facts)))
            undecided = undecided or missed
    return not_checked(undecided) if undecided else HELD


def _needless(facts: Facts, rung: str) -> str:
    return (
        f"the group settled on {settled(facts)}, and {rung} works under the same faults "
        f"({SUBJECT}, with {rung} ordered, used it with a correct result)"
    )


def _missed(facts: Facts, rung: str) -> str:
    """Which fault the counterfactual of this rung may have met otherwise than the subject did; empty if none."""
    for index, fault in enumerate(facts.scenario.faults):
        if fault.calls == "every" or fault.during not in ("any", "preflight", rung):
            continue
        struck = _struck_in_set_up(facts, index)
        if struck:
            return (
                f"{rung} alone worked, but fault {index} at {fault.at}, which struck {wording.ranks(struck)}, "
                f"counts calls: another sequence of calls meets it otherwise"
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
