"""What each rank decided in each step, and the first step at which the group split.

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


@dataclass(frozen=True)
class Split:
    """A step in which the ranks decided differently."""

    step: int
    title: str
    decisions: dict[int, Decision]

    @property
    def sentence(self) -> str:
        """``in create #1 rank 0 returned a mnnvl workspace and rank 1 raised RuntimeError``."""
        by_decision: dict[Decision, list[int]] = {}
        for rank, decision in sorted(self.decisions.items()):
            by_decision.setdefault(decision, []).append(rank)
        parts = [f"{wording.ranks(ranks)} {decision.title}" for decision, ranks in by_decision.items()]
        return f"in {self.title} {wording.joined(parts)}"


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
    """The ranks that can be asked to agree: neither ended by the scenario nor cut off from their
    group by a struck collective, unless that struck every one of them."""
    whole = [rank for rank in facts.judged if not struck_collectives(rank)]
    return whole or facts.judged


def splits(facts: Facts) -> Iterator[Split]:
    """The steps at which the survivors decided differently, in order."""
    asked = survivors(facts)
    decided = {rank.rank: decisions(rank) for rank in asked}
    titles = {step.index: step.title for rank in asked for step in rank.steps}
    for index in sorted(titles):
        here = {rank: made[index] for rank, made in decided.items() if index in made}
        if len(set(here.values())) > 1:
            yield Split(index, titles[index], here)
