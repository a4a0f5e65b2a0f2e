"""From a run's folder to typed facts.

Promise: reads ``run.json``, ``rank<N>.jsonl``, ``supervisor.jsonl`` and, where the runner
wrote one, ``counterfactuals.json``, and nothing else; never the clock and never the environment. A rank's events are taken in
the order of their numbers, up to the one with which the scenario itself took
the rank out. A kind of event that nothing asks for is passed over; a new one
gets a function here and a line in ``_RECORDERS``.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from faultlab import events
from faultlab.errors import LabError
from faultlab.events import Event
from faultlab.judge import counterfactual
from faultlab.judge.facts import Facts, RankFacts
from faultlab.judge.finding import Moment
from faultlab.judge.records import (
    Call,
    Capture,
    Census,
    Ended,
    Exit,
    Ledger,
    Probe,
    Returned,
    Said,
    StateAround,
    Step,
    StepError,
    Sticky,
    Strike,
    Use,
    Wait,
)
from faultlab.machine.base import LedgerObject
from faultlab.scenario.models import Scenario

#: The effects that take a rank out, and how that is said.
_ENDINGS: Final = {"kill": "killed", "hang": "hung", "poison": "poisoned"}


def read_facts(folder: Path) -> Facts:
    """The facts of the run in ``folder``. Raises LabError if it holds no run that can be read."""
    try:
        plan = json.loads((folder / "run.json").read_text())
        scenario = Scenario.model_validate(plan["scenario"])
        steps = scenario.steps
        ranks = [
            _rank(rank, list(events.read(folder / f"rank{rank}.jsonl")), steps)
            for rank in range(scenario.ranks)
        ]
        facts = Facts(
            scenario, plan["lane"], dict(plan.get("versions", {})), dict(plan.get("overrides") or {}), ranks
        )
        facts.counterfactuals = counterfactual.read(folder)
        _hear_supervisor(facts, events.read(folder / "supervisor.jsonl"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ValidationError) as error:
        raise LabError(f"{folder}: not a run that can be judged: {type(error).__name__}: {error}") from error
    return facts


# --------------------------------------------------------------- a rank's file


def _rank(number: int, recorded: list[Event], steps: int) -> RankFacts:
    """What a rank recorded, up to the event with which the scenario ended it."""
    rank = RankFacts(number, started=bool(recorded), last=Moment(number, -1, -1))
    # Threads write through connections of their own: the numbers are the order.
    recorded.sort(key=lambda event: int(event["n"]))
    rank.unknown_calls = [str(event["name"]) for event in recorded if event["kind"] == "unknown-call"]
    entered: list[tuple[Event, Moment]] = []
    outside = -1
    for event in recorded:
        kind = event["kind"]
        if kind == "step-begin":
            outside = steps  # From now on, outside of a step is after the workload.
        moment = rank.last = _moment(number, event, outside)
        if kind == "enter":
            entered.append((event, moment))
        elif (record := _RECORDERS.get(kind)) is not None:
            record(rank, event, moment)
        rank.ended = _ending(event, moment)
        if rank.ended is not None:
            break
    rank.calls = _calls(entered, recorded, rank.last.n)
    return rank


def _moment(rank: int, event: Event, outside: int) -> Moment:
    step = int(event.get("step", -1))
    thread = str(event.get("thread", "main"))
    return Moment(rank, int(event["n"]), step if step >= 0 else outside, float(event["t"]), thread)


def _ending(event: Event, moment: Moment) -> Ended | None:
    """Whether the scenario takes the rank out with this event."""
    if event["kind"] == "sticky" and event.get("injected"):
        return Ended("poisoned", moment, str(event["site"]))
    if event["kind"] != "fault" or event["effect"] not in _ENDINGS:
        return None
    if event["effect"] == "hang" and moment.thread != "main":
        return None  # A helper thread hangs; whether the rank does is the subject's matter.
    return Ended(_ENDINGS[event["effect"]], moment, str(event["site"]))


def _calls(entered: list[tuple[Event, Moment]], recorded: list[Event], last: int) -> list[Call]:
    """Every call with the end that was seen of it by event ``last``."""
    ends = {event["id"]: event for event in recorded if event["kind"] == "leave" and event["n"] <= last}
    return [_call(event, moment, ends.get(event["id"])) for event, moment in entered]


def _call(event: Event, began: Moment, end: Event | None) -> Call:
    told = (int(event["id"]), str(event["site"]), str(event["argument"]), bool(event["lab"]), began)
    if end is None:
        return Call(*told)
    ended = Moment(began.rank, int(end["n"]), began.step, float(end["t"]), began.thread)
    # What a call that failed had made, if anything, is in the event of its fault.
    made = tuple(_object(each) for each in end.get("made", ())) if end["result"] == "ok" else ()
    error = end.get("error") or {}
    raised, text = str(error.get("type") or ""), str(error.get("text") or "")
    return Call(*told, ended, str(end["result"]), made, raised, text)


def _object(told: dict[str, Any]) -> LedgerObject:
    return LedgerObject(
        str(told["kind"]),
        str(told["id"]),
        int(told.get("size_bytes", 0)),
        tuple(str(each) for each in told.get("depends_on", ())),
    )


def _step_begin(rank: RankFacts, event: Event, moment: Moment) -> None:
    rank.steps.append(Step(str(event["name"]), int(event["round"]) + 1, moment))


def _step_end(rank: RankFacts, event: Event, moment: Moment) -> None:
    result = event["result"]
    told = result.get("error")
    error = None
    if told is not None:
        error = StepError(
            str(told["type"]), str(told["text"]), str(told.get("code") or ""), bool(told.get("declared"))
        )
    rank.steps[-1] = replace(
        rank.steps[-1],
        ended=moment,
        returned=str(result["returned"]),
        error=error,
        backend=result.get("backend"),
        workspace=result.get("workspace"),
    )


def _fault(rank: RankFacts, event: Event, moment: Moment) -> None:
    rank.strikes.append(
        Strike(
            int(event["fault"]),
            int(event["id"]),
            str(event["site"]),
            str(event["effect"]),
            str(event["when"]),
            moment,
            tuple(event.get("refers", ())),
            tuple(event.get("made", ())),
        )
    )


def _sticky(rank: RankFacts, event: Event, moment: Moment) -> None:
    rank.stickies.append(
        Sticky(
            moment,
            str(event["error"]),
            str(event["site"]),
            bool(event.get("injected")),
            str(event.get("reason") or ""),
        )
    )


def _use(rank: RankFacts, event: Event, moment: Moment) -> None:
    rank.uses.append(
        Use(
            moment,
            int(event["number"]),
            int(event["tokens"]),
            math.inf if event["max_abs_error"] is None else float(event["max_abs_error"]),
            float(event["tolerance"]),
            bool(event["correct"]),
        )
    )


def _captured(rank: RankFacts, event: Event, moment: Moment) -> None:
    rank.captured[int(event["number"])] = moment


def _capture_begin(rank: RankFacts, event: Event, moment: Moment) -> None:
    rank.captures.append(Capture(moment))


def _capture_end(rank: RankFacts, event: Event, moment: Moment) -> None:
    rank.captures[-1] = replace(rank.captures[-1], ended=moment, error=str(event.get("error") or ""))


def _workspace(rank: RankFacts, event: Event, moment: Moment) -> None:
    pointer = event.get("mc_ptr")
    rank.returned.append(
        Returned(
            moment,
            str(event["workspace"]),
            str(event["backend"]),
            None if pointer is None else int(pointer),
            bool(event["needs_multicast"]),
        )
    )


def _ledger(rank: RankFacts, event: Event, moment: Moment) -> None:
    told = event["os"]
    descriptors = Counter({str(kind): int(count) for kind, count in told["descriptors"].items()})
    descriptors["socket"] += int(told.get("sockets", 0))
    census = Census(
        descriptors, Counter(told["threads"]), frozenset(told["folder"]), frozenset(told["shared_memory"])
    )
    objects = tuple(_object(each) for each in event["objects"])
    rank.ledgers.append(Ledger(moment, str(event["label"]), objects, census))


def _probe(rank: RankFacts, event: Event, moment: Moment) -> None:
    rank.probes.append(
        Probe(
            moment,
            str(event["name"]),
            str(event.get("label") or event["group"]),
            event["ok"],
            str(event.get("error") or ""),
        )
    )


def _sequence(rank: RankFacts, event: Event, moment: Moment) -> None:
    rank.sequence = {str(name): [str(each) for each in made] for name, made in event["groups"].items()}


def _start(rank: RankFacts, event: Event, moment: Moment) -> None:
    rank.logs = bool(event.get("logs"))
    rank.ladder = tuple(str(rung) for rung in event.get("ladder", ()))
    rank.own_sequence = bool(event.get("own_sequence"))


def _log(rank: RankFacts, event: Event, moment: Moment) -> None:
    logger, exception = str(event.get("logger") or ""), str(event.get("exception") or "")
    rank.said.append(Said(moment, str(event["level"]), str(event["message"]), logger, exception))


def _state(rank: RankFacts, event: Event, moment: Moment) -> None:
    before, after = event["before"], event["after"]
    changed = tuple(str(name) for name in before if before[name] != after.get(name))
    rank.states.append(StateAround(moment, changed))


_RECORDERS: Final = {
    "start": _start,
    "log": _log,
    "state": _state,
    "step-begin": _step_begin,
    "step-end": _step_end,
    "fault": _fault,
    "sticky": _sticky,
    "use": _use,
    "captured": _captured,
    "capture-begin": _capture_begin,
    "capture-end": _capture_end,
    "workspace": _workspace,
    "ledger": _ledger,
    "probe": _probe,
    "sequence": _sequence,
}


# --------------------------------------------------------- the supervisor's file


def _hear_supervisor(facts: Facts, told: Iterator[Event]) -> None:
    for event in told:
        kind = event["kind"]
        if kind == "hang":
            facts.waits = [_wait(row) for row in event["waits"]]
        elif kind == "over-budget":
            facts.over_budget = str(event["text"])
        elif kind == "lab-error":
            facts.lab_errors.append(str(event["text"]))
        elif kind == "rank-exit":
            facts.ranks[event["rank"]].exit = Exit(
                event["exit"], event["signal"], bool(event["expected"]), str(event.get("last_site") or "")
            )
        elif kind == "end":
            facts.machine_s, facts.seconds = float(event["machine_s"]), float(event["seconds"])


def _wait(row: dict[str, Any]) -> Wait:
    return Wait(
        int(row["rank"]),
        str(row["thread"]),
        str(row.get("site") or ""),
        str(row.get("kind") or ""),
        tuple(int(each) for each in row.get("waits_for", ())),
        str(row.get("text") or ""),
        float(row["since"]),
    )
