"""``truthful_ready``: "created" means usable on every rank.

Promise: broken if one rank's ``create`` returned a usable object while another
rank's same ``create`` raised, returned none or never returned. A rank that the
scenario took out, or that never began that create, says nothing about it.
"""

from __future__ import annotations

from faultlab.judge import wording
from faultlab.judge.facts import Facts, RankFacts
from faultlab.judge.finding import HELD, Finding, at_step, broken, not_checked
from faultlab.judge.records import Step


def check(facts: Facts) -> Finding:
    """Whether every create that was ready somewhere was ready everywhere."""
    ready_somewhere = False
    for index in sorted(
        {step.index for rank in facts.judged for step in rank.steps if step.name == "create"}
    ):
        asked = [(rank, step) for rank in facts.judged if (step := rank.step_at(index)) is not None]
        ready = [rank.rank for rank, step in asked if _usable(rank, step)]
        ready_somewhere = ready_somewhere or bool(ready)
        others = [(rank.rank, _how(step)) for rank, step in asked if step.returned != "object"]
        if ready and others:
            rank, how = others[0]
            title = asked[0][1].title
            return broken(
                f"{title} returned a usable workspace on {wording.ranks(ready)} and {how} on rank {rank}",
                at_step(index),
            )
    return HELD if ready_somewhere else not_checked("no create returned a usable object")


def _usable(rank: RankFacts, step: Step) -> bool:
    """An object was returned, and no kernel would die of it."""
    if step.returned != "object":
        return False
    named = [each for each in rank.returned if each.workspace == step.workspace]
    return not any(each.invalid for each in named)


def _how(step: Step) -> str:
    if step.ended is None:
        return "never returned"
    return f"raised {step.error.title}" if step.error is not None else "returned none"
