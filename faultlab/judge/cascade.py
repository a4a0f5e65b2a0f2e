"""No cascades: what only followed from a crash or a hang is not judged.

Promise: after a crash only ``no_cuda_crash``, after a hang only ``bounded_init``
is broken, besides what an earlier event had broken. Earlier means: on a rank
that crashed or hung, before that; on any other rank, in an earlier step of the
workload. Which of two ranks was first within a step differs from run to run,
and a verdict must not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from faultlab.judge.facts import Facts
from faultlab.judge.finding import Finding, Moment, not_checked

#: The one invariant that judges each of the two.
_OWN: Final = {"crash": "no_cuda_crash", "hang": "bounded_init"}


@dataclass(frozen=True)
class Stop:
    """Where the run went no further. ``ranks``: the event number at which each of those ranks stopped."""

    word: str
    step: int
    ranks: dict[int, int]
    sentence: str

    def comes_after(self, moment: Moment) -> bool:
        """Whether something at ``moment`` had happened before the run stopped."""
        if moment.rank in self.ranks:
            return moment.n < self.ranks[moment.rank]
        return moment.step < self.step


def stop_of(facts: Facts) -> Stop | None:
    """The crash of a run, else its hang, else nothing."""
    crashed = [(rank.rank, rank.crash) for rank in facts.judged if rank.crash is not None]
    if crashed:
        first, crash = crashed[0]
        step = min(each.moment.step for _, each in crashed)
        numbers = {rank: each.moment.n for rank, each in crashed}
        return Stop("crash", step, numbers, f"rank {first} crashed: {crash.text}")
    hung = [(rank, rank.hung) for rank in facts.judged if rank.hung is not None]
    if hung:
        first_rank, stuck = hung[0]
        step = min(each.index for _, each in hung)
        numbers = {rank.rank: rank.last.n for rank, _ in hung}
        return Stop("hang", step, numbers, f"rank {first_rank.rank} never left {stuck.title}")
    return None


def without_cascades(name: str, finding: Finding, stop: Stop | None) -> Finding:
    """The finding, unless it only followed from the end of the run or needs what did not live to see it."""
    if stop is None or _OWN[stop.word] == name:
        return finding
    if finding.moment is not None and stop.comes_after(finding.moment):
        return finding
    return not_checked(f"({stop.word}) {stop.sentence}")
