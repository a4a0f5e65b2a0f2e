"""``state_neutral``: the caller's state is untouched: Python and torch random
state, current device, inference mode, environment, default dtype.

Promise: each of them is the same after every step as before it. What is
compared is what ``rank/state.py`` takes; a new kind of state is a new key there.
"""

from __future__ import annotations

from faultlab.judge.facts import Facts
from faultlab.judge.finding import HELD, Finding, broken, not_checked


def check(facts: Facts) -> Finding:
    """Whether no step changed what belongs to the caller."""
    compared = 0
    for rank in facts.judged:
        for change in rank.states:
            compared += 1
            if change.changed:
                step = rank.step_at(change.moment.step)
                title = step.title if step is not None else "a step"
                return broken(f"rank {rank.rank}: {title} changed {', '.join(change.changed)}", change.moment)
    return HELD if compared else not_checked("no step came to its end")
