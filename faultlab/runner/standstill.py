"""Who waits for whom: a hang is found by reasoning, not by waiting.

Every thread of every live rank records what it waits for. When all of them
wait, and nothing that has happened could let one of them go on, nothing ever
will but a time-out. This module only reasons over that picture; looking at the
clock, the processes and the connections is the supervisor's part.

What keeps a false alarm out: a rank counts as waiting only between its own
"wait-begin" and "wait-end"; a wait that may be satisfied by what was recorded (every
member of the collective has entered it) counts as movable; and the supervisor
believes a standstill only after it saw every thread of every live rank asleep,
twice, with nothing said and nothing recorded in between.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any


class Movement(Enum):
    """What can happen next."""

    RUNNING = "somebody runs"
    MOVABLE = "all wait, but somebody may have what it waits for"
    STUCK = "all wait, and nobody can let anybody go"


@dataclass
class Wait:
    """What one thread waits for, as it announced it (``events.WAIT``)."""

    identity: int
    site: str
    kind: str
    since: float
    needs: tuple[int, ...] = ()
    group: str = ""
    number: int = 0
    deadline: float | None = None
    text: str = ""


@dataclass
class RankState:
    """What the supervisor knows of one rank."""

    rank: int
    pid: int = 0
    alive: bool = True
    #: The threads that are connected, and the request that one waits in until it is answered.
    threads: dict[str, Wait | None] = field(default_factory=dict)
    #: By thread, the waits that it recorded and is in, innermost last.
    waits: dict[str, list[Wait]] = field(default_factory=dict)
    #: How many collectives of each group this rank has entered.
    entered: dict[str, int] = field(default_factory=dict)
    step: int = -1
    step_name: str = ""
    step_since: float = 0.0
    started: bool = False
    finished: bool = False

    def wait_of(self, thread: str) -> Wait | None:
        """What a thread waits for. A request is the innermost wait: who is in one records nothing."""
        parked = self.threads.get(thread)
        waits = self.waits.get(thread)
        return parked or (waits[-1] if waits else None)

    def current(self) -> list[tuple[str, Wait | None]]:
        """Every connected thread, and what it waits for."""
        return [(thread, self.wait_of(thread)) for thread in self.threads]


def movement(ranks: list[RankState]) -> Movement:
    """What can happen next among the live ranks."""
    result = Movement.STUCK
    for state in ranks:
        if not state.alive:
            continue
        if not state.started or not state.threads:
            return Movement.RUNNING
        for _, wait in state.current():
            if wait is None:
                return Movement.RUNNING
            if may_leave(wait, ranks):
                result = Movement.MOVABLE
    return result


def may_leave(wait: Wait, ranks: list[RankState]) -> bool:
    """Whether what was reported so far could satisfy this wait.

    A collective is satisfied when every rank it needs has entered it (or a
    later one of the group). A dead member may end it with an error, so it
    counts as movable. Parked requests, sockets and joins are never satisfied
    while everybody waits: only a running thread could do that.
    """
    if wait.kind != "collective":
        return False
    for needed in wait.needs:
        state = ranks[needed]
        if state.entered.get(wait.group, 0) >= wait.number or not state.alive:
            continue
        return False
    return True


def earliest_deadline(ranks: list[RankState]) -> float | None:
    """The first time-out among all waits of the live ranks."""
    deadlines = [
        wait.deadline
        for state in ranks
        if state.alive
        for _, wait in state.current()
        if wait is not None and wait.deadline is not None
    ]
    return min(deadlines, default=None)


def end_of_budget(ranks: list[RankState], init_s: float) -> float | None:
    """The moment at which the last live rank has used up its step's budget;
    None while no live rank is in a step of the workload."""
    ends = [state.step_since + init_s for state in ranks if state.alive and state.step_name]
    return max(ends, default=None)


def table(ranks: list[RankState]) -> list[dict[str, Any]]:
    """Who waits where, for the report: a row per waiting thread of a live rank."""
    rows = []
    for state in ranks:
        if not state.alive:
            continue
        for thread, wait in state.current():
            if wait is None:
                continue
            rows.append(
                {
                    "rank": state.rank,
                    "thread": thread,
                    "site": wait.site,
                    "kind": wait.kind,
                    "waits_for": _waited_for(wait, ranks),
                    "text": wait.text,
                    "since": round(wait.since, 6),
                    "deadline": wait.deadline,
                    "step": state.step,
                }
            )
    return rows


def _waited_for(wait: Wait, ranks: list[RankState]) -> list[int]:
    if wait.kind != "collective":
        return list(wait.needs)
    return [needed for needed in wait.needs if ranks[needed].entered.get(wait.group, 0) < wait.number]


def all_asleep(pids: list[int]) -> bool:
    """Whether every thread of these processes sleeps in the kernel now."""
    return all(_asleep(pid) for pid in pids)


def _asleep(pid: int) -> bool:
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            stat = (task / "stat").read_bytes()
            # The state is the field after the command, which is in parentheses.
            state = stat[stat.rindex(b")") + 2 : stat.rindex(b")") + 3]
            if state not in (b"S", b"I"):
                return False
    except OSError:
        return False
    return True
