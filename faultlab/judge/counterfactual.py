"""Which rungs must be tried alone before a fallback can be judged, and what came of it.

Promise: pure. ``needed`` asks of a run's facts which higher rungs its group passed
by; ``scenario_for`` is the scenario that tries one of them; ``answer`` and ``read`` are
the two ends of ``counterfactuals.json`` in a run's folder, the file by which the runner
hands over what it saw, so that judging stays a pure function of the folder.

The subject of a counterfactual is ``reference``, never the subject under test: the
question is whether a careful consumer could have had the rung. One that refuses a rung
without need would refuse it when it is ordered too, and so excuse itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from faultlab import events
from faultlab.judge.decisions import survivors
from faultlab.judge.facts import Facts, RankFacts
from faultlab.judge.outcome import created_rung, outcome_of
from faultlab.judge.paths import LADDER, final_path
from faultlab.judge.records import Counterfactual, Step
from faultlab.scenario.models import Scenario, Subject, WorkspaceSpec

FILE: Final = "counterfactuals.json"
SUBJECT: Final = "reference"


def why_none(facts: Facts) -> str:
    """Why no rung is asked about; empty if there are some, which ``needed`` names."""
    if facts.scenario.workspace.backend != "auto":
        return "the back end is the user's choice"
    if not _ladder(facts):
        return "the subject declares no ladder of its own"
    if facts.lost:
        gone = facts.lost[0]
        assert gone.ended is not None
        return f"rank {gone.rank} was {gone.ended.title}"
    ended = outcome_of(facts).outcome
    if ended != "fallback":
        return f"the outcome is {ended or 'none'}: no fallback"
    if settled(facts) is None:
        return "on which rung the group settled was not seen"
    return "" if _passed_by(facts) else "set-up settled on the best rung that is the subject's to choose"


def needed(facts: Facts) -> tuple[str, ...]:
    """The rungs that the group passed by and that the machine supports without
    faults, best first. They are tried in runs of their own.

    ``reference`` tries its first rung as a counterfactual would, with the same calls in
    the same order, so its own run answers for that one.
    """
    if why_none(facts):
        return ()
    rungs = _passed_by(facts)
    if facts.scenario.subject.name == SUBJECT:
        return tuple(rung for rung in rungs if rung != _start(facts.scenario))
    return rungs


def settled(facts: Facts) -> str | None:
    """The rung on which the group settled: the higher one of what create gave and
    what carried the last all-reduce, because a use may be too large for a workspace.
    A create while a stream captures settles nothing: it may set nothing up."""
    found = {_settled(rank) for rank in survivors(facts)}
    return found.pop() if len(found) == 1 else None


def _settled(rank: RankFacts) -> str | None:
    if not any(_sets_up(rank, step) for step in rank.steps):
        return None
    rungs = [rung for rung in (created_rung(rank), final_path(rank)) if rung in LADDER]
    return min(rungs, key=LADDER.index, default=None)


def _sets_up(rank: RankFacts, step: Step) -> bool:
    """Whether this is a create that ended and could have set something up."""
    captured = any(each.holds(step.began) for each in rank.captures)
    return step.name == "create" and step.ended is not None and not captured


def _ladder(facts: Facts) -> tuple[str, ...]:
    return facts.ranks[0].ladder if facts.ranks else ()


def _start(scenario: Scenario) -> str:
    """Where an automatic choice begins."""
    return scenario.workspace.preferred or LADDER[0]


def _passed_by(facts: Facts) -> tuple[str, ...]:
    scenario, ladder, end = facts.scenario, _ladder(facts), settled(facts)
    assert end is not None
    between = LADDER[LADDER.index(_start(scenario)) : LADDER.index(end)]
    supported = scenario.topology.rungs(scenario.ranks)
    return tuple(rung for rung in between if rung in ladder and rung in supported)


# ------------------------------------------------------------ the run of one rung


def scenario_for(scenario: Scenario, rung: str) -> Scenario:
    """The same machine, ranks, faults and budget, with ``rung`` ordered and used once.
    Equal for all scenarios that ask the same question, whatever they are called."""
    workspace = {**scenario.workspace.model_dump(), "backend": rung, "preferred": None}
    return Scenario(
        id=f"counterfactual-{rung}",
        path="",
        line=1,
        title=f"{rung} alone under the same faults",
        topology=scenario.topology,
        ranks=scenario.ranks,
        subject=Subject(name=SUBJECT),
        workspace=WorkspaceSpec.model_validate(workspace),
        workload=("create", "use", "destroy", "exit"),
        faults=tuple(fault.model_copy(update={"optional": True}) for fault in scenario.faults),
        budget=scenario.budget,
    )


def answer(facts: Facts, *, broken: tuple[str, ...], unknown: str) -> dict[str, Any]:
    """What ``counterfactuals.json`` keeps of a judged counterfactual."""
    ended = outcome_of(facts)
    return {
        "outcome": ended.outcome,
        "path": ended.path,
        "broken": list(broken),
        "unknown": unknown,
    }


def write(folder: Path, answers: dict[str, dict[str, Any]]) -> None:
    """Write the answers, by rung, into the folder of the run that asked."""
    told = {"v": events.VERSION, "subject": SUBJECT, "rungs": answers}
    (folder / FILE).write_text(json.dumps(told, indent=1))


def read(folder: Path) -> dict[str, Counterfactual]:
    """The answers in a run's folder, by rung; none where nothing was asked. Raises
    ValueError, LookupError, TypeError or AttributeError for a file that is not one."""
    path = folder / FILE
    if not path.exists():
        return {}
    told = json.loads(path.read_text())
    if told["v"] != events.VERSION:
        raise ValueError(f"{path}: event schema {told['v']}, this faultlab reads {events.VERSION}")
    return {str(rung): _record(each) for rung, each in told["rungs"].items()}


def _record(told: dict[str, Any]) -> Counterfactual:
    outcome = told["outcome"]
    return Counterfactual(
        None if outcome is None else str(outcome),
        tuple(str(name) for name in told["broken"]),
        str(told["unknown"]),
    )
