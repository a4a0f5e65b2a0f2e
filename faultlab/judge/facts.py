"""The facts of a run: what every rank did, in its own order, and what the supervisor saw.

Promise: typed, complete for every check, and without a judgement in them but
one: a rank that the scenario itself killed, hung or poisoned ends, for every
reader, with the event that did it (``RankFacts.ended``), so that nothing later
can be held against the subject. ``reading`` makes them from a run's folder.

An invariant that needs something new adds a record (``records``), a field here
and a recorder in ``reading``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from faultlab.judge.finding import Moment
from faultlab.judge.records import (
    Call,
    Capture,
    Counterfactual,
    Crash,
    Ended,
    Exit,
    Ledger,
    Probe,
    Returned,
    Said,
    StateAround,
    Step,
    Sticky,
    Strike,
    Use,
    Wait,
)
from faultlab.scenario.models import Scenario


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
    captures: list[Capture] = field(default_factory=list)
    #: When a use that was captured was launched, by its number.
    captured: dict[int, Moment] = field(default_factory=dict)
    returned: list[Returned] = field(default_factory=list)
    ledgers: list[Ledger] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
    states: list[StateAround] = field(default_factory=list)
    logs: bool = False
    ladder: tuple[str, ...] = ()
    own_sequence: bool = False
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

    def launch_of(self, use: Use) -> Moment:
        """When all calls of this use had been made: a captured one is compared later than that."""
        return self.captured.get(use.number, use.moment)

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
    counterfactuals: dict[str, Counterfactual] = field(default_factory=dict)
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
