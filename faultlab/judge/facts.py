"""From a run's folder to typed facts: what every rank did, in its own order.

Promise: reads ``run.json``, ``rank<N>.jsonl`` and ``supervisor.jsonl``, never the
clock and never the environment, and judges nothing. A rank that the scenario
itself killed, hung or poisoned ends, for every reader of these facts, with the
event that did it (``RankFacts.ended``): nothing later can be held against the
subject.

An invariant that needs something new adds a record (``records``), a field here
and a line in ``_rank``; a kind of event that nothing asks for is passed over.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from faultlab import events
from faultlab.errors import LabError
from faultlab.events import Event
from faultlab.judge.finding import Moment
from faultlab.judge.records import (
    Call,
    Census,
    Crash,
    Ended,
    Exit,
    Ledger,
    Probe,
    Returned,
    Step,
    StepError,
    Sticky,
    Strike,
    Use,
    Wait,
)
from faultlab.machine.base import LedgerObject
from faultlab.scenario.models import Scenario

_ENDINGS: Final = {"kill": "killed", "hang": "hung", "poison": "poisoned"}


@dataclass
class RankFacts:
    """What one rank did. Lists are in the rank's own order of events."""

    rank: int
    started: bool = False
    last: Moment = field(default_factory=lambda: Moment(0, -1, -1))
    calls: list[Call] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    strikes: list[Strike] = field(default_factory=list)
    stickies: list[Sticky] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    returned: list[Returned] = field(default_factory=list)
    ledgers: list[Ledger] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    sequence: dict[str, list[str]] | None = None
    unknown_calls: list[str] = field(default_factory=list)
    exit: Exit | None = None
    ended: Ended | None = None

    @cached_property
    def by_identity(self) -> dict[int, Call]:
        """The calls by their ids."""
        return {call.identity: call for call in self.calls}

    @cached_property
    def crash(self) -> Crash | None:
        """The first sign of a crash that the scenario did not cause itself."""
        if self.ended is not None:
            return None
        signs = [
            Crash(each.moment, f"{each.error} at {each.site}{f' ({each.reason})' if each.reason else ''}")
            for each in self.stickies
        ]
        signs += [
            Crash(each.moment, f"the context answers {each.error or 'an error'} after the workload")
            for each in self.probes
            if each.name == "context" and each.ok is False
        ]
        if self.exit is not None and not self.exit.expected:
            where = self.exit.last_site or "its start"
            text = f"the process ended with {self.exit.title} at {where}"
            signs.append(Crash(replace(self.last, n=self.last.n + 1), text))
        return min(signs, key=lambda sign: sign.moment.n, default=None)

    @cached_property
    def hung(self) -> Step | None:
        """The step that this rank never left, unless it crashed or the scenario ended it."""
        unfinished = bool(self.steps) and self.steps[-1].ended is None
        return self.steps[-1] if unfinished and self.ended is None and self.crash is None else None

    def step_at(self, index: int) -> Step | None:
        """What this rank did in one step of the workload."""
        return next((step for step in self.steps if step.index == index), None)

    def ledger(self, label: str) -> Ledger | None:
        """The last ledger with this label."""
        return next((each for each in reversed(self.ledgers) if each.label == label), None)

    def creation_of(self, returned: Returned) -> Call | None:
        """The ``workspace.create`` that a returned object came from."""
        before = [
            call
            for call in self.calls
            if call.site == "workspace.create" and call.ended and call.ended.n < returned.moment.n
        ]
        return max(before, key=lambda call: call.ended.n if call.ended else -1, default=None)


@dataclass
class Facts:
    """A run: its plan, its ranks, and what the supervisor saw."""

    scenario: Scenario
    lane: str
    versions: dict[str, str]
    overrides: dict[str, Any]
    ranks: list[RankFacts]
    waits: list[Wait] = field(default_factory=list)
    over_budget: str = ""
    lab_errors: list[str] = field(default_factory=list)
    machine_s: float | None = None
    seconds: float | None = None

    @property
    def judged(self) -> list[RankFacts]:
        """The ranks that the scenario left alive."""
        return [rank for rank in self.ranks if rank.ended is None]

    @property
    def lost(self) -> list[RankFacts]:
        """The ranks that the scenario killed, hung or poisoned."""
        return [rank for rank in self.ranks if rank.ended is not None]

    def wait_of(self, rank: int) -> Wait | None:
        """What a rank's main thread waited for when nothing could move."""
        rows = [row for row in self.waits if row.rank == rank]
        return next((row for row in rows if row.thread == "main"), rows[0] if rows else None)

    def fired(self, fault: int) -> dict[int, int]:
        """How often a fault of the scenario fired, per rank."""
        counts = {each.rank: sum(strike.fault == fault for strike in each.strikes) for each in self.ranks}
        return {rank: count for rank, count in counts.items() if count}


def read_facts(folder: Path) -> Facts:
    """The facts of the run in ``folder``. Raises LabError if it holds no run that can be read."""
    try:
        plan = json.loads((folder / "run.json").read_text())
        scenario = Scenario.model_validate(plan["scenario"])
        steps = len(scenario.workload)
        ranks = [
            _rank(rank, list(events.read(folder / f"rank{rank}.jsonl")), steps)
            for rank in range(scenario.ranks)
        ]
        facts = Facts(
            scenario, plan["lane"], dict(plan.get("versions", {})), dict(plan.get("overrides") or {}), ranks
        )
        _hear_supervisor(facts, events.read(folder / "supervisor.jsonl"))
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise LabError(f"{folder}: not a run that can be judged: {type(error).__name__}: {error}") from error
    return facts


# --------------------------------------------------------------- a rank's file


def _rank(number: int, recorded: list[Event], steps: int) -> RankFacts:
    """What a rank recorded, up to the event with which the scenario ended it."""
    rank = RankFacts(number, started=bool(recorded))
    # Threads write through connections of their own: the numbers are the order.
    recorded.sort(key=lambda event: int(event["n"]))
    rank.unknown_calls = [str(event["name"]) for event in recorded if event["kind"] == "unknown-call"]
    rank.last = Moment(number, -1, -1)
    begun = False
    for event in recorded:
        begun = begun or event["kind"] == "step-begin"
        step = int(event.get("step", -1))
        moment = Moment(
            number,
            int(event["n"]),
            steps if step < 0 and begun else step,
            float(event["t"]),
            str(event.get("thread", "main")),
        )
        rank.last = moment
        record = _RECORDERS.get(event["kind"])
        if record is not None:
            record(rank, event, moment)
        rank.ended = _ending(event, moment)
        if rank.ended is not None:
            break
    _join_calls(rank, recorded)
    return rank


def _ending(event: Event, moment: Moment) -> Ended | None:
    """Whether the scenario takes the rank out with this event."""
    if event["kind"] == "sticky" and event.get("injected"):
        return Ended("poisoned", moment, str(event["site"]))
    if event["kind"] != "fault" or event["effect"] not in _ENDINGS:
        return None
    if event["effect"] == "hang" and moment.thread != "main":
        return None  # A helper thread hangs; whether the rank does is the subject's matter.
    return Ended(_ENDINGS[event["effect"]], moment, str(event["site"]))


def _enter(rank: RankFacts, event: Event, moment: Moment) -> None:
    rank.calls.append(
        Call(int(event["id"]), str(event["site"]), str(event["argument"]), bool(event["lab"]), moment)
    )


def _join_calls(rank: RankFacts, recorded: list[Event]) -> None:
    """Give every call the end that was seen of it."""
    ends = {int(event["id"]): event for event in recorded if event["kind"] == "leave"}
    joined = []
    for call in rank.calls:
        event = ends.get(call.identity)
        if event is not None and int(event["n"]) <= rank.last.n:
            made = tuple(_object(each) for each in event.get("made", ()))
            ended = replace(call.began, n=int(event["n"]), t=float(event["t"]))
            call = replace(call, ended=ended, result=str(event["result"]), made=made)
        joined.append(call)
    rank.calls = joined


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
            float(event["max_abs_error"]),
            float(event["tolerance"]),
            bool(event["correct"]),
        )
    )


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


_RECORDERS: Final = {
    "enter": _enter,
    "step-begin": _step_begin,
    "step-end": _step_end,
    "fault": _fault,
    "sticky": _sticky,
    "use": _use,
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
