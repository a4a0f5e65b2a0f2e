"""The objects of ``results.jsonl``: what people script against.

Promise: every result, skipped ones too, has exactly the keys of ``KEYS``, in this
order, and is plain JSON. ``reason`` answers on its first line why the verdict is
what it is; the lines after it name the title, say ``own sequence`` where the subject
set its workspaces up itself and not by FlashInfer's creation, and name what differs
from the expected breaks. ``text`` renders these objects and knows nothing else.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from faultlab.judge import Judgement
from faultlab.judge.facts import Facts
from faultlab.judge.outcome import RankOutcome
from faultlab.scenario.models import Scenario
from faultlab.scenario.selectors import ranks_of

#: The line of a reason that says what was not judged: FlashInfer's creation.
OWN_SEQUENCE: Final = "own sequence: the subject sets the memory up itself; FlashInfer's creation did not run"
#: One object of results.jsonl.
Result = dict[str, Any]

KEYS: Final = (
    "id",
    "file",
    "line",
    "lane",
    "subject",
    "verdict",
    "reason",
    "outcome",
    "path",
    "invariants",
    "faults",
    "ranks",
    "seconds",
    "machine_s",
    "replay",
)


def result_object(judgement: Judgement, folder: Path) -> Result:
    """The result of a judged run. ``folder`` is where it was recorded: its name is in no key, because
    ``run --out`` moves it."""
    assert folder.name, "a run has a folder"
    facts, outcome = judgement.facts, judgement.outcome
    return _result(
        facts.scenario,
        facts.lane,
        facts.overrides,
        verdict=judgement.verdict.word,
        reason=_reason(judgement),
        outcome=outcome.outcome,
        path=outcome.path,
        invariants={
            name: {"state": finding.state, "reason": finding.reason}
            for name, finding in judgement.invariants.items()
        },
        faults=_faults(facts.scenario, [facts.fired(index) for index in range(len(facts.scenario.faults))]),
        ranks=[_rank(facts, each) for each in outcome.ranks],
        seconds=facts.seconds,
        machine_s=facts.machine_s,
    )


def skipped_result(
    scenario: Scenario, lane: str, reason: str, overrides: Mapping[str, Any] | None = None
) -> Result:
    """The result of a scenario that cannot run here, with the reason."""
    assert reason, "a scenario is skipped for a reason"
    return _result(
        scenario,
        lane,
        overrides or {},
        verdict="skipped",
        reason=reason,
        outcome=None,
        path=None,
        invariants={},
        faults=_faults(scenario, [{} for _ in scenario.faults]),
        ranks=[],
        seconds=0.0,
        machine_s=0.0,
    )


def replay_command(scenario: Scenario, lane: str, overrides: Mapping[str, Any]) -> str:
    """The one command that runs this scenario again."""
    command = f"faultlab run {shlex.quote(scenario.path)} -k '{result_id(scenario, lane)}' --lane {lane}"
    subject = overrides.get("subject")
    return command if subject is None else f"{command} --subject {shlex.quote(str(subject))}"


def result_id(scenario: Scenario, lane: str) -> str:
    """``stem[key=value,…]-sim``: one scenario in one lane."""
    return f"{scenario.id}-{lane}"


def _result(scenario: Scenario, lane: str, overrides: Mapping[str, Any], **fields: Any) -> Result:
    result: Result = {
        "id": result_id(scenario, lane),
        "file": scenario.path,
        "line": scenario.line,
        "lane": lane,
        "subject": scenario.subject.label,
        **fields,
        "replay": replay_command(scenario, lane, overrides),
    }
    assert tuple(result) == KEYS, tuple(result)
    return result


def _reason(judgement: Judgement) -> str:
    verdict, expect = judgement.verdict, judgement.facts.scenario.expect
    lines = [verdict.answer, f"title: {judgement.facts.scenario.title}"]
    if any(rank.own_sequence for rank in judgement.facts.ranks):
        lines.append(OWN_SEQUENCE)
    lines += [f"unexpected: {name}" for name in verdict.unexpected]
    lines += [f"missing: {name} ({expect.breaks[name].url})" for name in verdict.missing]
    return "\n".join(lines)


def _faults(scenario: Scenario, fired: list[dict[int, int]]) -> list[dict[str, Any]]:
    """Each fault with the ranks it names and how often it fired on each of them."""
    described = []
    for fault, counts in zip(scenario.faults, fired, strict=True):
        ranks = sorted(ranks_of(fault.ranks, scenario.ranks, scenario.topology.gpus.count))
        fired_on = {str(rank): counts.get(rank, 0) for rank in ranks}
        described.append({"at": fault.at, "ranks": ranks, "fired": fired_on})
    return described


def _rank(facts: Facts, each: RankOutcome) -> dict[str, Any]:
    rank = facts.ranks[each.rank]
    row = facts.wait_of(each.rank)
    blocked_on = None
    if row is not None:
        blocked_on = {
            "site": row.site,
            "kind": row.kind,
            "waits_for": list(row.waits_for),
            "text": row.text,
            "since": row.since,
        }
    ended = rank.exit
    return {
        "rank": each.rank,
        "outcome": each.outcome,
        "exit": None if ended is None else ended.signal or ended.status,
        "last_site": _last_site(facts, each.rank),
        "blocked_on": blocked_on,
    }


def _last_site(facts: Facts, number: int) -> str | None:
    rank = facts.ranks[number]
    if rank.exit is not None and rank.exit.last_site:
        return rank.exit.last_site
    return rank.calls[-1].site if rank.calls else None
