"""``bounded_init``: every rank leaves set-up within the scenario's budget, whatever its peers do.

Promise: each create, use and destroy of each rank takes at most
``budget.init_s`` of machine time, and no rank stays in a step for good. A delay
that the scenario put on a rank is taken off that rank's own time, and off
nobody else's: whoever waits for a late peer needs a limit of its own. To judge
another step, add its name to ``_STEPS``.
"""

from __future__ import annotations

from typing import Final

from faultlab.judge import wording
from faultlab.judge.facts import Facts, RankFacts
from faultlab.judge.finding import HELD, Finding, broken, not_checked
from faultlab.judge.records import Step

_STEPS: Final = ("create", "use", "destroy")


def check(facts: Facts) -> Finding:
    """Whether nobody was late and nobody hung."""
    late = [(step, rank) for rank in facts.judged for step in rank.steps if _late(facts, rank, step)]
    hung = [(rank.hung, rank) for rank in facts.judged if rank.hung is not None]
    if late:
        step, rank = min(late, key=lambda each: (each[0].index, each[1].rank))
        assert step.ended is not None
        if not any(stuck.index <= step.index for stuck, _ in hung):
            return broken(_lateness(facts, rank, step), step.ended)
    if hung:
        step, rank = min(hung, key=lambda each: (each[0].index, each[1].rank))
        return broken(standstill(facts, rank, step), rank.last)
    if not any(step.name in _STEPS and step.ended for rank in facts.judged for step in rank.steps):
        return not_checked("no rank came to a create, a use or a destroy")
    return HELD


def _late(facts: Facts, rank: RankFacts, step: Step) -> bool:
    if step.name not in _STEPS or step.ended is None:
        return False
    return step.seconds - own_delay(facts, rank, step) > facts.scenario.budget.init_s


def own_delay(facts: Facts, rank: RankFacts, step: Step) -> float:
    """The machine time that the scenario put on this rank's own main thread in a step."""
    effects = [
        facts.scenario.faults[strike.fault].effect
        for strike in rank.strikes
        if strike.moment.step == step.index and strike.moment.thread == "main"
    ]
    return sum((effect.delay_s or 0.0) + effect.after_s for effect in effects)


def _lateness(facts: Facts, rank: RankFacts, step: Step) -> str:
    budget = wording.seconds(facts.scenario.budget.init_s)
    text = f"rank {rank.rank} left {step.title} after {wording.seconds(step.seconds)} of machine time; "
    text += f"the budget is {budget}"
    for other in facts.ranks:
        delay = own_delay(facts, other, step)
        if delay:
            whose = "its own delay" if other is rank else f"the delay of rank {other.rank}"
            text += f", and {whose} by the scenario was {wording.seconds(delay)}"
            break
    return text


def standstill(facts: Facts, rank: RankFacts, step: Step) -> str:
    """Who waits for whom, from a rank that never left its step, as one sentence."""
    text = f"rank {rank.rank} never left {step.title}"
    row = facts.wait_of(rank.rank)
    if row is None:
        why = wording.shortened(facts.over_budget, 200) or "nobody said what it waits for"
        return f"{text}: {why}"
    text += f": it {row.title}"
    # Without a peer that is still to come, the ranks met in different calls: say one of those.
    others = row.waits_for or [peer.rank for peer in facts.ranks if peer.hung and peer is not rank][:1]
    peers = [facts.wait_of(peer) for peer in others]
    said = [f"rank {peer.rank} {peer.title}" for peer in peers if peer is not None and peer.rank != rank.rank]
    gone = [facts.ranks[peer].ended for peer in row.waits_for if 0 <= peer < len(facts.ranks)]
    said += [f"that rank was {ended.title}" for ended in gone if ended is not None and ended.how != "hung"]
    if said:
        text += f", and {wording.joined(said[:2])}"
    return text
