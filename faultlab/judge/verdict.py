"""The verdict: ``pass``, ``fail`` or ``unknown``, with the cause on the first line.

Promise: ``unknown`` comes first (the run could not show what it was for: the lab
failed, a call was met that nobody can answer, a listed fault never fired), and is
never a pass. ``pass``: the broken invariants are exactly those that are expected
of this subject, and outcome and path, where given, match on every rank that
speaks for the group. ``skipped`` is said before a run, by ``report.results``.
To add a reason for ``unknown``, add a line to ``_unknown``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from faultlab.judge import wording
from faultlab.judge.breaks import expected_breaks
from faultlab.judge.facts import Facts
from faultlab.judge.finding import Finding
from faultlab.judge.outcome import GroupOutcome
from faultlab.judge.registry import NOT_BUILT, failed
from faultlab.scenario.models import Break
from faultlab.scenario.selectors import ranks_of

Word = Literal["pass", "fail", "unknown"]

#: For these the file's outcome and path hold even when the command line names the subject.
_HELD_TO_THE_FILE: Final = ("reference", "hardened")


@dataclass(frozen=True)
class Verdict:
    """``answer``: the cause in one line. ``unexpected`` and ``missing``: the
    difference of the broken set from the expected one."""

    word: Word
    answer: str
    unexpected: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def verdict_of(facts: Facts, outcome: GroupOutcome, findings: dict[str, Finding]) -> Verdict:
    """The verdict on a run."""
    scenario = facts.scenario
    expected = expected_breaks(scenario.expect.breaks, scenario.subject, facts.versions)
    broken = [name for name, finding in findings.items() if finding.state == "broken"]
    unexpected = tuple(name for name in broken if name not in expected)
    missing = tuple(name for name in expected if name not in broken)
    unknown = next(_unknown(facts, findings, expected), "")
    if unknown:
        return Verdict("unknown", unknown, unexpected, missing)
    answer = _difference(facts, outcome, findings, unexpected, missing, expected)
    if answer:
        return Verdict("fail", answer, unexpected, missing)
    return Verdict("pass", _as_expected(outcome, broken))


def _unknown(facts: Facts, findings: dict[str, Finding], expected: dict[str, Break]) -> Iterator[str]:
    """Why this run shows nothing, the deepest cause first."""
    for error in facts.lab_errors:
        yield f"the lab itself failed: {error}"
    for rank in facts.ranks:
        for name in rank.unknown_calls:
            if name.startswith("subject: "):
                yield f"the subject could not be loaded: {name.removeprefix('subject: ')}"
            else:
                yield f"rank {rank.rank} met a call that the machine does not know: {name}"
    for rank in facts.ranks:
        if not rank.started:
            yield f"rank {rank.rank} recorded no events"
        elif rank.exit is None:
            yield f"how rank {rank.rank} ended was not recorded"
        elif not rank.steps and rank.ended is None and not rank.exit.expected:
            yield f"rank {rank.rank} ended with {rank.exit.title} before the workload began"
    for name, finding in findings.items():
        if failed(finding):
            yield f"{name}: {finding.reason}"
    yield from _never_fired(facts)
    for name in expected:
        if findings[name] is NOT_BUILT:
            yield f"{name} is expected to break, and this version cannot judge it"


def _never_fired(facts: Facts) -> Iterator[str]:
    scenario = facts.scenario
    for index, fault in enumerate(scenario.faults):
        if not fault.optional and not facts.fired(index):
            struck = ranks_of(fault.ranks, scenario.ranks, scenario.topology.gpus.count)
            yield f"fault {index} at {fault.at} never fired on {wording.ranks(struck)}"


def _difference(
    facts: Facts,
    outcome: GroupOutcome,
    findings: dict[str, Finding],
    unexpected: tuple[str, ...],
    missing: tuple[str, ...],
    expected: dict[str, Break],
) -> str:
    """What differs from what is expected, the first cause only; empty if nothing does."""
    if unexpected:
        return f"{unexpected[0]}: {findings[unexpected[0]].reason}"
    mismatch = _mismatch(facts, outcome)
    if mismatch:
        return mismatch
    if missing:
        name = missing[0]
        why = findings[name].reason or "it held"
        return f"{name} was expected to break ({expected[name].url}) and did not: {why}"
    return ""


def _mismatch(facts: Facts, outcome: GroupOutcome) -> str:
    """Where outcome or path differ from the file's."""
    scenario = facts.scenario
    if "subject" in facts.overrides and scenario.subject.name not in _HELD_TO_THE_FILE:
        return ""
    expect = scenario.expect
    if expect.outcome is not None and outcome.outcome != expect.outcome:
        return f"the outcome is {outcome.outcome or 'none'}, expected {expect.outcome}{_whose(outcome)}"
    if expect.path is None:
        return ""
    other = [rank for rank in outcome.ranks if rank.rank in outcome.speaking and rank.path != expect.path]
    if not other:
        return ""
    path = other[0].path
    carried = "nothing carried the all-reduce" if path is None else f"{path} carried the all-reduce"
    return f"{carried} on {wording.ranks(rank.rank for rank in other)}, expected {expect.path}"


def _whose(outcome: GroupOutcome) -> str:
    ranks = [rank.rank for rank in outcome.ranks if rank.outcome == outcome.outcome]
    return f" ({wording.ranks(ranks)})" if 0 < len(ranks) < len(outcome.ranks) else ""


def _as_expected(outcome: GroupOutcome, broken: list[str]) -> str:
    text = f"{outcome.outcome or 'no outcome'}, as expected"
    return f"{text}; broken as expected: {', '.join(broken)}" if broken else text
