"""``ranks_agree``: all ranks take the same decision: back end, fallback, retry.

Promise: step by step, every rank that is asked (``decisions.comparisons``) ended
it alike. After a kill, a hang or a struck collective only the survivors are
asked; they leave with the same error or go on alike. What counts as a decision
is ``decisions.Decision``'s word: a new aspect is a new field there.
"""

from __future__ import annotations

from faultlab.judge.decisions import comparisons
from faultlab.judge.facts import Facts
from faultlab.judge.finding import HELD, Finding, at_step, broken, not_checked


def check(facts: Facts) -> Finding:
    """Whether the group never split."""
    compared = list(comparisons(facts))
    for each in compared:
        if each.split:
            return broken(each.sentence, at_step(each.step))
    asked = max((len(each.decisions) for each in compared), default=0)
    if asked == 0:
        return not_checked("no step came to its end")
    if asked == 1:
        return not_checked("no step came to its end on two ranks that can be compared")
    return HELD
