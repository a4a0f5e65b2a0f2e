"""What carried the all-reduce, and what should have: the path of each use and the first rung.

Promise: a path is what was *seen* at the kernels and collectives while the step
``use`` ran, never what an object says of itself. A new rung is a new argument
of ``kernel.allreduce`` and a name in ``_KERNELS``.
"""

from __future__ import annotations

from typing import Final

from faultlab.judge.facts import RankFacts
from faultlab.judge.records import Call
from faultlab.scenario.models import Scenario

_KERNEL: Final = "kernel.allreduce"
_PLAIN: Final = "comm.allreduce"
_KERNELS: Final = ("mnnvl", "trtllm")
LADDER: Final = ("mnnvl", "trtllm", "none")


def first_rung(scenario: Scenario) -> str:
    """The rung that carries the all-reduce here when nothing is struck."""
    if scenario.workspace.backend != "auto":
        return scenario.workspace.backend
    supported = scenario.topology.rungs(scenario.ranks)
    start = LADDER.index(scenario.workspace.preferred or LADDER[0])
    return next(rung for rung in LADDER[start:] if rung in supported)


def paths_of(rank: RankFacts) -> dict[int, list[str | None]]:
    """Per step of the workload, what carried each all-reduce in it; None where nothing was seen."""
    carriers = [call for call in rank.calls if carries(call)]
    found: dict[int, list[str | None]] = {}
    previous = -1
    for use in rank.uses:
        launched = rank.launch_of(use)
        inside = [
            call
            for call in carriers
            if call.ok and call.began.step == launched.step and previous < call.began.n < launched.n
        ]
        found.setdefault(launched.step, []).append(_carrier(inside))
        previous = launched.n
    return found


def carries(call: Call) -> bool:
    """Whether this call of the subject is an all-reduce, by a kernel or by the group."""
    if call.lab:
        return False
    return call.site == _PLAIN or (call.site == _KERNEL and call.argument in _KERNELS)


def _carrier(calls: list[Call]) -> str | None:
    """A kernel that ran carried it, whatever a vote asked the group besides."""
    kernels = [call.argument for call in calls if call.site == _KERNEL]
    if kernels:
        return kernels[-1]
    return "none" if calls else None


def final_path(rank: RankFacts) -> str | None:
    """What carried the last all-reduce of this rank; None if none was seen."""
    seen = [path for paths in paths_of(rank).values() for path in paths if path is not None]
    return seen[-1] if seen else None
