"""What each rank decided in each step, and where the group split.

Promise: two decisions are equal if a caller on either rank would go on alike:
the same kind of answer, the same back end, the same path, or an error of the
same type with the same named code; texts and addresses never count. Used by
``outcome`` and by ``ranks_agree``, so the two cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from faultlab.judge import wording
from faultlab.judge.facts import Facts, RankFacts
from faultlab.judge.paths import paths_of
from faultlab.judge.records import Step, Strike


@dataclass(frozen=True)
class Decision:
    """How a step ended on one rank, as far as the ranks have to agree on it."""

    returned: str
    error: str = ""
    backend: str = ""
    paths: tuple[str | None, ...] = ()

    @property
    def title(self) -> str:
        """``returned a mnnvl workspace``, ``raised RuntimeError (CUDA_ERROR_UNKNOWN)``."""
        if self.returned == "raised":
            return f"raised {self.error}"
        if self.returned == "object":
            return f"returned a {self.backend or 'nameless'} workspace"
        if self.returned == "none":
            return "returned no workspace"
        if self.paths:
            seen = dict.fromkeys(path or "something unseen" for path in self.paths)
            return f"used {wording.joined(list(seen))}"
        return "had nothing to use" if self.returned == "skipped" else "returned"


def decisions(rank: RankFacts) -> dict[int, Decision]:
    """What a rank decided, per step that it left."""
    paths = paths_of(rank)
    return {step.index: _decision(step, paths.get(step.index, ())) for step in rank.steps if step.ended}


def _decision(step: Step, paths: Iterable[str | None]) -> Decision:
    error = step.error.title if step.error is not None else ""
    return Decision(step.returned, error, step.backend or "", tuple(paths))


def struck_collectives(rank: RankFacts) -> list[tuple[Strike, str]]:
    """The collectives of this rank that a fault broke, each with its group."""
    found = []
    for strike in rank.strikes:
        call = rank.by_identity.get(strike.identity)
        if strike.site.startswith("comm.") and strike.loses and call is not None:
            found.append((strike, call.argument))
    return found


def survivors(facts: Facts) -> list[RankFacts]:
    """The ranks that speak for the group in the end: neither ended by the scenario nor cut off from
    their group by a struck collective, unless that struck every one of them."""
    whole = [rank for rank in facts.judged if not struck_collectives(rank)]
    return whole or facts.judged


@dataclass(frozen=True)
class Comparison:
    """A step of the workload, and how each of the ranks decided in it that are asked to agree."""

    step: int
    title: str
    decisions: dict[int, Decision]

    @property
    def split(self) -> bool:
        """Whether two ranks decided differently."""
        return len(set(self.decisions.values())) > 1

    @property
    def sentence(self) -> str:
        """``in create #1 rank 0 returned a mnnvl workspace and rank 1 raised RuntimeError``."""
        by_decision: dict[Decision, list[int]] = {}
        for rank, decision in sorted(self.decisions.items()):
            by_decision.setdefault(decision, []).append(rank)
        parts = [f"{wording.ranks(ranks)} {decision.title}" for decision, ranks in by_decision.items()]
        return f"in {self.title} {wording.joined(parts)}"


def comparisons(facts: Facts) -> Iterator[Comparison]:
    """Step by step, what was decided. A rank that the scenario ended is asked about the steps it had
    left by then, one that was cut off about the steps before that, unless all of them were."""
    decided = {rank.rank: decisions(rank) for rank in facts.ranks}
    cut_off = {rank.rank: _cut_off(rank, facts.scenario.steps) for rank in facts.ranks}
    titles = {step.index: step.title for rank in facts.ranks for step in rank.steps}
    for index in sorted(titles):
        here = {rank: made[index] for rank, made in decided.items() if index in made}
        whole = {rank: made for rank, made in here.items() if index < cut_off[rank]}
        yield Comparison(index, titles[index], whole or here)


def _cut_off(rank: RankFacts, never: int) -> int:
    """The first step in which a collective of this rank was struck."""
    return min((strike.moment.step for strike, _ in struck_collectives(rank)), default=never)
