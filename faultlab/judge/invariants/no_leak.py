"""``no_leak``: what set-up took is given back after a failure and after destroy.

Promise: compares the ledger at the end, and the one after each create that
failed, with the baseline: the machine's objects by id, and descriptors,
sockets, threads, files and shared memory by name or number. What the scenario
itself made impossible to give back is passed over (``exemptions``) and said.
A new kind of thing that can leak is a field of ``records.Census`` and a line in
``_system``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from faultlab.judge import wording
from faultlab.judge.exemptions import Exemptions, exemptions
from faultlab.judge.facts import Facts, RankFacts
from faultlab.judge.finding import HELD, Finding, Moment, broken, not_checked
from faultlab.judge.records import Ledger, Step
from faultlab.machine.base import LedgerObject

#: What takes device memory; a range or a mapping of it takes none of its own.
_MEMORY: Final = ("handle", "allocation", "standin")


@dataclass(frozen=True)
class Comparison:
    """One ledger against the baseline."""

    rank: int
    moment: Moment
    when: str
    objects: list[LedgerObject]
    system: list[str]
    excused: int


def check(facts: Facts) -> Finding:
    """Whether every rank is back at its baseline."""
    compared = [each for rank in facts.ranks for each in _comparisons(facts, rank)]
    leaks = [each for each in compared if each.objects or each.system]
    if leaks:
        first = min(leaks, key=lambda each: (each.moment.step, each.rank))
        others = {each.rank for each in leaks} - {first.rank}
        also = f"; {wording.ranks(others)} leaked too" if others else ""
        return broken(f"{_sentence(facts.ranks[first.rank], first)}{also}", first.moment)
    excused = [each for each in compared if each.excused]
    if excused:
        first = excused[0]
        sites = wording.joined(exemptions(facts.ranks[first.rank]).sites or ("a call",))
        things = wording.counted(first.excused, "thing")
        return not_checked(
            f"rank {first.rank}: {things} could not be given back: the scenario struck {sites}"
        )
    if not {each.rank for each in compared} & {rank.rank for rank in facts.judged}:
        return not_checked(_why_nothing(facts))
    return HELD


def _why_nothing(facts: Facts) -> str:
    if not facts.judged:
        return "the scenario left no rank alive"
    if not _gives_back(facts):
        return "the workload has no destroy, and no create failed"
    return "no ledger was taken after the workload"


def _gives_back(facts: Facts) -> bool:
    return any(step in ("destroy", "exit") for step in facts.scenario.workload)


def _comparisons(facts: Facts, rank: RankFacts) -> list[Comparison]:
    baseline = rank.ledger("baseline")
    if baseline is None:
        return []
    exempt = exemptions(rank)
    found = []
    for ledger in rank.ledgers:
        failed = _failed_create(rank, ledger) if ledger.label == "step" else None
        if failed is not None and not _holds_an_object(rank, failed):
            when = f"after {failed.title} {'raised' if failed.error else 'returned none'}"
            if failed.error is not None:
                when += f" {failed.error.title}"
            found.append(_compare(rank, baseline, ledger, exempt, when))
    end = rank.ledger("end")
    made_one = any(step.returned == "object" for step in rank.steps)
    if end is not None and (_gives_back(facts) or not made_one):
        when = "after destroy" if _gives_back(facts) else "after the workload"
        found.append(_compare(rank, baseline, end, exempt, when))
    return found


def _failed_create(rank: RankFacts, ledger: Ledger) -> Step | None:
    """The create that this ledger was taken after, if it gave no object."""
    step = rank.step_at(ledger.moment.step)
    failed = step is not None and step.name == "create" and step.returned in ("none", "raised")
    return step if failed else None


def _holds_an_object(rank: RankFacts, failed: Step) -> bool:
    """Whether an earlier create gave an object that nothing has destroyed since: it is alive by right."""
    holds = False
    for step in rank.steps:
        if step.index >= failed.index:
            break
        holds = (holds or step.returned == "object") and step.name not in ("destroy", "exit")
    return holds


def _compare(rank: RankFacts, baseline: Ledger, ledger: Ledger, exempt: Exemptions, when: str) -> Comparison:
    before = {each.id for each in baseline.objects}
    alive = [each for each in ledger.objects if each.id not in before]
    held_against = [each for each in alive if not exempt.covers(each)]
    system, excused = _system(baseline, ledger, exempt)
    return Comparison(
        rank.rank, ledger.moment, when, held_against, system, len(alive) - len(held_against) + excused
    )


def _system(baseline: Ledger, ledger: Ledger, exempt: Exemptions) -> tuple[list[str], int]:
    """What the operating system holds more of, in words; and how much of it is excused."""
    before, after = baseline.census, ledger.census
    descriptors = after.descriptors - before.descriptors
    threads = after.threads - before.threads
    files = sorted(after.folder - before.folder)
    shared = sorted(after.shared_memory - before.shared_memory)
    total = descriptors.total() + threads.total() + len(files) + len(shared)
    if exempt.system:
        return [], total
    excused = min(exempt.descriptors, descriptors.total())
    if excused == descriptors.total():
        descriptors = Counter()
    said = [wording.counted(count, f"{kind} descriptor") for kind, count in sorted(descriptors.items())]
    said = [text.replace("socket descriptor", "socket") for text in said]
    if threads:
        said.append(_named(threads.total(), "thread", sorted(threads)))
    if files:
        said.append(_named(len(files), "temporary file", files))
    if shared:
        said.append(_named(len(shared), "shared-memory file", shared))
    return said, excused


def _named(count: int, noun: str, names: list[str]) -> str:
    return f"{wording.counted(count, noun)} ({wording.shortened(names[0], 60)})"


def _sentence(rank: RankFacts, leak: Comparison) -> str:
    """``rank 0: 6 handles, 3 ranges (70.0 MiB) alive after destroy; first: handle h3 made by …``."""
    kinds = Counter(each.kind for each in leak.objects)
    parts = [wording.counted(count, kind) for kind, count in kinds.items()]
    memory = sum(each.size_bytes for each in leak.objects if each.kind in _MEMORY)
    text = ", ".join([*parts, *leak.system])
    if memory:
        text = ", ".join(parts) + f" ({wording.size(memory)})" + "".join(f", {each}" for each in leak.system)
    text = f"rank {rank.rank}: {text} alive {leak.when}"
    if leak.objects:
        text += f"; first: {_origin(rank, leak.objects[0])}"
    return text


def _origin(rank: RankFacts, leaked: LedgerObject) -> str:
    """``handle h3 made by cuMemCreate in create #1``."""
    name = f"{leaked.kind} {leaked.id}"
    for call in rank.calls:
        if any(made.id == leaked.id for made in call.made):
            step = rank.step_at(call.began.step)
            return f"{name} made by {call.site}" + (f" in {step.title}" if step is not None else "")
    return name
