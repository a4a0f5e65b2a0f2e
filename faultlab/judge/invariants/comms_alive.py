"""``comms_alive``: collectives still work afterwards, in the same order on all ranks.

Promise: for every group that the scenario left whole, all ranks made the same
collectives in the same order, and the lab's own collectives after the workload
came back right on every rank. A group with a struck collective is passed over,
and every group is once a rank was lost.
"""

from __future__ import annotations

from typing import Final

from faultlab.judge import wording
from faultlab.judge.decisions import struck_collectives
from faultlab.judge.facts import Facts, RankFacts
from faultlab.judge.finding import HELD, Finding, at_step, broken, not_checked
from faultlab.judge.invariants.no_cuda_crash import titles_of_lost

#: torch's names of the lab's two groups, where a probe does not say it: they are made first.
_LABELS: Final = {"world": "0", "bystanders": "1"}


def check(facts: Facts) -> Finding:
    """Whether the groups are in step and answer."""
    if facts.lost:
        return not_checked(f"every group lost a member: {titles_of_lost(facts)}")
    struck = {group for rank in facts.ranks for _, group in struck_collectives(rank)}
    finding = _out_of_step(facts, struck) or _silent(facts, struck)
    if finding is not None:
        return finding
    missing = _unanswered(facts, struck)
    return not_checked(missing) if missing else HELD


def _label(rank: RankFacts, name: str) -> str:
    """The name under which a probed group's collectives were recorded."""
    known = rank.sequence or {}
    return name if name in known else _LABELS.get(name, name)


def _out_of_step(facts: Facts, struck: set[str]) -> Finding | None:
    """The first group whose ranks made different collectives."""
    sequences = {rank.rank: rank.sequence or {} for rank in facts.ranks}
    after = at_step(facts.scenario.steps)
    for name in sorted(set().union(*sequences.values()) - struck):
        told = {rank: made[name] for rank, made in sequences.items() if name in made}
        first = min(told)
        for rank, made in told.items():
            if made != told[first]:
                return broken(_difference(name, first, told[first], rank, made), after)
    return None


def _difference(group: str, first: int, mine: list[str], other: int, theirs: list[str]) -> str:
    for index, (here, there) in enumerate(zip(mine, theirs, strict=False)):
        if here != there:
            text = f"collective {index + 1} of group {group} was {here} on rank {first}"
            return f"{text} and {there} on rank {other}"
    return f"rank {first} made {len(mine)} collectives in group {group} and rank {other} made {len(theirs)}"


def _silent(facts: Facts, struck: set[str]) -> Finding | None:
    """A probe that failed, or that the run ended in."""
    after = at_step(facts.scenario.steps)
    for rank in facts.ranks:
        for probe in rank.probes:
            if probe.name == "collective" and probe.ok is False and _label(rank, probe.group) not in struck:
                error = wording.shortened(probe.error)
                return broken(
                    f"rank {rank.rank}: the lab's collectives on group {probe.group} failed afterwards: {error}",
                    after,
                )
    for rank in facts.ranks:
        stuck = _stuck_in_probe(facts, rank)
        if stuck is not None and stuck not in struck:
            row = facts.wait_of(rank.rank)
            why = f"it {row.title}" if row is not None else wording.shortened(facts.over_budget)
            return broken(
                f"rank {rank.rank} never came back from the lab's collectives on group {stuck}: {why}", after
            )
    return None


def _stuck_in_probe(facts: Facts, rank: RankFacts) -> str | None:
    """The group of the lab's collective in which this rank was when the run was ended."""
    if not (facts.waits or facts.over_budget) or rank.sequence is None:
        return None
    inside = [
        call for call in rank.calls if call.lab and call.ended is None and call.site.startswith("comm.")
    ]
    return inside[-1].argument if inside else None


def _unanswered(facts: Facts, struck: set[str]) -> str:
    """Why ``held`` cannot be said; empty if it can."""
    for rank in facts.ranks:
        probes = [probe for probe in rank.probes if probe.name == "collective"]
        left = [probe for probe in probes if _label(rank, probe.group) not in struck]
        unasked = [probe.group for probe in left if probe.ok is None]
        if unasked:
            return f"rank {rank.rank}: the lab could not ask group {unasked[0]}"
        if not left and struck:
            groups = wording.joined(sorted(struck))
            return f"the scenario itself struck a collective of group {groups}, and no other was asked"
        if not left or rank.sequence is None:
            return f"rank {rank.rank}: the lab did not come to ask the groups"
    return ""
