"""The judge: what a run's recorded events say about the clean-fallback contract.

Promise: ``judge`` is a pure function of a run's folder: the same folder always
gets the same judgement, on any machine, with or without GPUs. The parts, in
the order in which they are used:

    reading    the folder as typed ``facts`` (``records``, ``paths``, ``decisions`` besides)
    outcome    how each rank and the group ended, in one word
    counterfactual  which rungs the runner has to try alone first, and the file that tells how they ended
    registry   every invariant's finding; one file each under ``invariants/``
    cascade    takes back what only followed from a crash or a hang
    verdict    pass, fail or unknown, with the cause in one line

To add an invariant, see ``registry``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from faultlab.judge.facts import Facts
from faultlab.judge.finding import Finding
from faultlab.judge.outcome import GroupOutcome, outcome_of
from faultlab.judge.reading import read_facts
from faultlab.judge.registry import judge_all
from faultlab.judge.verdict import Verdict, verdict_of

__all__ = ["Finding", "Judgement", "judge", "judge_facts", "read_facts"]


@dataclass(frozen=True)
class Judgement:
    """Everything that is said about one run; ``report.results`` makes an object of results.jsonl of it."""

    facts: Facts
    outcome: GroupOutcome
    invariants: dict[str, Finding]
    verdict: Verdict

    @property
    def broken(self) -> tuple[str, ...]:
        """The names of the broken invariants, in the contract's order."""
        return tuple(name for name, finding in self.invariants.items() if finding.state == "broken")


def judge(folder: Path) -> Judgement:
    """Judge the run in ``folder``. Raises LabError if there is no run in it that can be read."""
    return judge_facts(read_facts(folder))


def judge_facts(facts: Facts) -> Judgement:
    """Judge what ``read_facts`` read, for a caller that has it already."""
    outcome = outcome_of(facts)
    findings = judge_all(facts)
    return Judgement(facts, outcome, findings, verdict_of(facts, outcome, findings))
