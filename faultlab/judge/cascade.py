"""No cascades: what only followed from a crash or a hang is not judged.

Promise: after a crash only ``no_cuda_crash``, after a hang only ``bounded_init``
is broken, besides what an earlier event had broken. Earlier than a crash is, on
the rank itself, what came before it, and on the others, what they did in earlier
steps of the workload. Earlier than a hang is whatever a rank recorded: nobody
could move when it was found, so a rank had always come just as far. What ranks
did together must lie in an earlier step. Machine time decides nothing: which of
two ranks is first within a step differs from run to run, and a verdict must not.
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
    """Where the run went no further. ``ranks``: from which event on nothing of a rank counts any more;
    of a rank that is not there, and of the group, only what lies before ``step`` counts."""

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
        first, crash = min(crashed, key=lambda each: each[1].moment.step)
        numbers = {rank: each.moment.n for rank, each in crashed}
        return Stop("crash", crash.moment.step, numbers, f"rank {first} crashed: {crash.text}")
    hung = [(rank.rank, rank.hung) for rank in facts.judged if rank.hung is not None]
    if hung:
        first, stuck = min(hung, key=lambda each: each[1].index)
        numbers = {rank.rank: rank.last.n + 1 for rank in facts.ranks}
        return Stop("hang", stuck.index, numbers, f"rank {first} never left {stuck.title}")
    return None


def without_cascades(name: str, finding: Finding, stop: Stop | None) -> Finding:
    """The finding, unless it only followed from the end of the run or needs what did not live to see it."""
    if stop is None or _OWN[stop.word] == name:
        return finding
    if finding.moment is not None and stop.comes_after(finding.moment):
        return finding
    return not_checked(f"({stop.word}) {stop.sentence}")
