"""``fail_once``: a failed configuration is remembered; it is not tried again per call or per layer.

Promise: counts, per rank, the creations of each back end. After one that raised
or gave an unusable object, the same back end is not created again. A destroy
by the workload is a new beginning: what failed before it may be tried after it.
"""

from __future__ import annotations

from faultlab.judge.facts import Facts, RankFacts
from faultlab.judge.finding import HELD, Finding, broken, not_checked
from faultlab.judge.records import Call

_CHANCES = ("create", "use", "collective")


def check(facts: Facts) -> Finding:
    """Whether no rank tried again what had failed."""
    failures = 0
    for rank in facts.judged:
        failed: dict[str, int] = {}
        for call in _creations(rank):
            backend = call.argument
            if backend in failed and not _destroyed_between(rank, failed[backend], call.began.n):
                return broken(
                    f"rank {rank.rank}: creation of {backend} had failed and was tried again "
                    f"in step {call.began.step}",
                    call.began,
                )
            if _failed(rank, call):
                failed[backend] = call.began.n
                failures += _chance_after(rank, call.began.n)
    return HELD if failures else not_checked("no creation failed with a step after it that could try again")


def _creations(rank: RankFacts) -> list[Call]:
    return [call for call in rank.calls if call.site == "workspace.create" and not call.lab]


def _failed(rank: RankFacts, call: Call) -> bool:
    if call.ended is None:
        return False
    return not call.ok or any(each.invalid for each in rank.returned if rank.creation_of(each) is call)


def _destroyed_between(rank: RankFacts, first: int, second: int) -> bool:
    return any(step.name == "destroy" and first < step.began.n < second for step in rank.steps)


def _chance_after(rank: RankFacts, number: int) -> bool:
    return any(step.name in _CHANCES and step.began.n > number for step in rank.steps)
