"""``fail_once``: a failed configuration is remembered; it is not tried again per call or per layer.

Promise: counts, per rank, the creations of each back end. After one that raised
or gave an unusable object, the same back end is not created again. A set-up may
also fail before or without a creation of FlashInfer's: after a create that gave no
object, the driver's call that had failed in it is not made again in a later step.
A destroy by the workload is a new beginning: what failed before it may be tried after it.
"""

from __future__ import annotations

from typing import Final

from faultlab.judge.facts import Facts, RankFacts
from faultlab.judge.finding import HELD, Finding, broken, not_checked
from faultlab.judge.records import Call, Step
from faultlab.sites import SITES

_CHANCES: Final = ("create", "use", "collective")
#: The calls that take or join something. A question that is asked again is no try.
_SET_UP: Final = ("cuMem", "cuMulticast", "cudart.cudaMalloc")


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
        again = _call_again(rank)
        if again is not None:
            failed_in, call = again
            step = rank.step_at(call.began.step)
            return broken(
                f"rank {rank.rank}: {call.site} had failed in {failed_in.title}, which gave no workspace, and "
                f"was tried again in {step.title if step is not None else 'a later step'}",
                call.began,
            )
        failures += any(_chance_after(rank, call.began.n) for _, call in _failed_calls(rank))
    return HELD if failures else not_checked("no set-up failed with a step after it that could try again")


def _creations(rank: RankFacts) -> list[Call]:
    return [call for call in rank.calls if call.site == "workspace.create" and not call.lab]


def _failed(rank: RankFacts, call: Call) -> bool:
    if call.ended is None:
        return False
    return not call.ok or any(each.invalid for each in rank.returned if rank.creation_of(each) is call)


def _failed_calls(rank: RankFacts) -> list[tuple[Step, Call]]:
    """The last try of each set-up call in a create that gave no object, where that try failed."""
    found: list[tuple[Step, Call]] = []
    for step in rank.steps:
        if step.name == "create" and step.returned in ("none", "raised"):
            last = {
                call.site: call for call in rank.calls if call.began.step == step.index and _sets_up(call)
            }
            found += [(step, call) for call in last.values() if call.ended is not None and not call.ok]
    return found


def _call_again(rank: RankFacts) -> tuple[Step, Call] | None:
    """The first call that had failed in an earlier create and was made again, and that create."""
    for step, failed in _failed_calls(rank):
        for call in rank.calls:
            if call.site != failed.site or call.began.step <= step.index or not _sets_up(call):
                continue
            if not _destroyed_between(rank, failed.began.n, call.began.n):
                return step, call
    return None


def _sets_up(call: Call) -> bool:
    known = SITES.get(call.site)
    return not call.lab and call.site.startswith(_SET_UP) and (known is None or not known.releases)


def _destroyed_between(rank: RankFacts, first: int, second: int) -> bool:
    return any(step.name == "destroy" and first < step.began.n < second for step in rank.steps)


def _chance_after(rank: RankFacts, number: int) -> bool:
    return any(step.name in _CHANCES and step.began.n > number for step in rank.steps)
