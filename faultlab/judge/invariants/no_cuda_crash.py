"""``no_cuda_crash``: no sticky CUDA error, signal, exit or dead rank; the context works afterwards.

Promise: broken by the first sign of a crash on any rank (``RankFacts.crash``):
a kernel that met an unusable pointer, a context that answers an error, a
process that ended by no word of its own. A rank that the scenario itself
killed, hung or poisoned is no such sign. To add a sign, add it there.
"""

from __future__ import annotations

from faultlab.judge import wording
from faultlab.judge.facts import Facts
from faultlab.judge.finding import HELD, Finding, broken, not_checked


def check(facts: Facts) -> Finding:
    """Whether every rank that the scenario left alive lives to its end."""
    crashed = [rank for rank in facts.judged if rank.crash is not None]
    if crashed:
        first = crashed[0]
        assert first.crash is not None
        others = [rank.rank for rank in crashed[1:]]
        also = f"; {wording.ranks(others)} crashed too" if others else ""
        step = next((step.title for step in reversed(first.steps)), "the start")
        return broken(f"rank {first.rank}: {first.crash.text}, in {step}{also}", first.crash.moment)
    if not facts.judged:
        return not_checked(f"the scenario left no rank alive: {titles_of_lost(facts)}")
    return HELD


def titles_of_lost(facts: Facts) -> str:
    """``rank 1 was killed by the scenario at cuMemMap``."""
    by_title: dict[str, list[int]] = {}
    for rank in facts.lost:
        assert rank.ended is not None
        by_title.setdefault(rank.ended.title, []).append(rank.rank)
    said = [
        f"{wording.ranks(ranks)} {'was' if len(ranks) == 1 else 'were'} {title}"
        for title, ranks in by_title.items()
    ]
    return wording.joined(said)
