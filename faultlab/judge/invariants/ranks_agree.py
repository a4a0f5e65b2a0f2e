"""``ranks_agree``: all ranks take the same decision: back end, fallback, retry.

Promise: step by step, every rank that is asked (``decisions.survivors``) ended
it alike. After a kill, a hang or a struck collective only the survivors are
asked; they leave with the same error or go on alike. What counts as a decision
is ``decisions.Decision``'s word: a new aspect is a new field there.
"""

from __future__ import annotations

from faultlab.judge.decisions import splits, survivors
from faultlab.judge.facts import Facts
from faultlab.judge.finding import HELD, Finding, at_step, broken, not_checked
from faultlab.judge.invariants.no_cuda_crash import titles_of_lost


def check(facts: Facts) -> Finding:
    """Whether the group never split."""
    split = next(iter(splits(facts)), None)
    if split is not None:
        return broken(split.sentence, at_step(split.step))
    asked = survivors(facts)
    if not asked:
        return not_checked(f"the scenario left no rank alive: {titles_of_lost(facts)}")
    if len(asked) == 1 and len(facts.ranks) > 1:
        return not_checked(f"only rank {asked[0].rank} is left to ask")
    if not any(step.ended for rank in asked for step in rank.steps):
        return not_checked("no step came to its end")
    return HELD
