"""``bounded_init``: every rank leaves set-up within the scenario's budget, whatever its peers do.

Promise: each create, use, capture and destroy of each rank takes at most
``budget.init_s`` of machine time, and no rank stays in a step for good. A delay
that the scenario put on a rank is not held against that rank itself, but it is
against its peers: whoever waits for a late one needs a limit of its own. To
judge another step, add its name to ``_STEPS``.
"""

from __future__ import annotations

from typing import Final

from faultlab.judge import wording
from faultlab.judge.facts import Facts, RankFacts
from faultlab.judge.finding import HELD, Finding, broken, not_checked
from faultlab.judge.records import Step

_STEPS: Final = ("create", "use", "capture", "destroy")


def check(facts: Facts) -> Finding:
    """Whether nobody was late and nobody hung."""
    late = [(step, rank) for rank in facts.ranks for step in rank.steps if _late(facts, rank, step)]
    stuck_ranks = [(rank.hung, rank) for rank in facts.judged if rank.hung is not None]
    hung = [(step, rank) for step, rank in stuck_ranks if not _only_delayed(facts, rank, step)]
    if late:
        step, rank = min(late, key=lambda each: (each[0].index, each[1].rank))
        assert step.ended is not None
        if not any(stuck.index <= step.index for stuck, _ in hung):
            return broken(_lateness(facts, rank, step), step.ended)
    if hung:
        step, rank = min(hung, key=lambda each: (each[0].index, each[1].rank))
        return broken(standstill(facts, rank, step), rank.last)
    if stuck_ranks:
        return not_checked(f"the scenario itself delays rank {stuck_ranks[0][1].rank} past the budget")
    if not any(step.name in _STEPS and step.ended for rank in facts.ranks for step in rank.steps):
        return not_checked("no rank came to a create, a use or a destroy")
    return HELD


def _late(facts: Facts, rank: RankFacts, step: Step) -> bool:
    if step.name not in _STEPS or step.ended is None:
        return False
    return step.seconds - own_delay(facts, rank, step) > facts.scenario.budget.init_s


def _only_delayed(facts: Facts, rank: RankFacts, step: Step) -> bool:
    """Whether this rank is still in its step because the scenario lets it sleep there."""
    row = facts.wait_of(rank.rank)
    return row is not None and row.kind == "sleep" and own_delay(facts, rank, step) > 0


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
    peers = row.waits_for or [peer.rank for peer in facts.ranks if peer.hung and peer is not rank][:1]
    said = [_said_of(facts, facts.ranks[peer]) for peer in peers if peer in range(len(facts.ranks))]
    told = [each for each in said if each][:2]
    return f"{text}, and {wording.joined(told)}" if told else text


def _said_of(facts: Facts, peer: RankFacts) -> str:
    """What a rank that is waited for does, or what became of it; empty if nobody knows."""
    if peer.ended is not None and peer.ended.how != "hung":
        return f"rank {peer.rank} was {peer.ended.title}"
    row = facts.wait_of(peer.rank)
    return f"rank {peer.rank} {row.title}" if row is not None else ""
