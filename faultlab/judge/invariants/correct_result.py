"""``correct_result``: the all-reduce that runs in the end equals the reference, on every rank.

Promise: every ``use`` that came back is compared; a result that the scenario
itself falsified (a value at ``kernel.allreduce``) is not held against the
subject, but one that the subject gave out corrected is.
"""

from __future__ import annotations

from faultlab.judge.facts import Facts, RankFacts
from faultlab.judge.finding import HELD, Finding, broken, not_checked
from faultlab.judge.records import Use


def check(facts: Facts) -> Finding:
    """Whether every result is right, within the rounding of its type."""
    wrong = [(use.moment.step, rank, use) for rank in facts.ranks for use in rank.uses if not use.correct]
    own = [(step, rank, use) for step, rank, use in wrong if not _falsified(rank, use)]
    if own:
        _, rank, use = min(own, key=lambda each: (each[0], each[1].rank))
        return broken(
            f"rank {rank.rank}: all-reduce {use.number} ({use.tokens} tokens) is off by {use.error:g}; "
            f"the tolerance is {use.tolerance:g}",
            use.moment,
        )
    if wrong:
        _, rank, use = wrong[0]
        return not_checked(f"rank {rank.rank}: the scenario itself falsified all-reduce {use.number}")
    if not any(rank.uses for rank in facts.ranks):
        return not_checked("no all-reduce came back")
    return HELD


def _falsified(rank: RankFacts, use: Use) -> bool:
    """Whether the scenario changed the output of a kernel of this very use."""
    launched = rank.launch_of(use)
    earlier = [rank.launch_of(each).n for each in rank.uses if rank.launch_of(each).n < launched.n]
    began = max(earlier, default=-1)
    return any(
        strike.effect == "value"
        and strike.site == "kernel.allreduce"
        and strike.moment.step == launched.step
        and began < strike.moment.n < launched.n
        for strike in rank.strikes
    )
