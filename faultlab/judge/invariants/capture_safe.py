"""``capture_safe``: nothing is set up, retried or registered while a stream captures.

Promise: broken by the first call in a capture that makes, maps, binds or
exchanges what a workspace stands on (``_SETS_UP``), whatever it answered, and by a
capture that ended invalidated, whichever call did that. Calls of every thread
count: the driver refuses them all alike in torch's own mode, ``global``. Calls that
only ask, launch, or give driver memory back are no set-up: recorded answers let
them pass (cuMemRelease, cuMemUnmap), while those that free spoil the capture and
are in the list. Loading a kernel at its first use is not counted either.
"""

from __future__ import annotations

from typing import Final

from faultlab.judge.facts import Facts, RankFacts
from faultlab.judge.finding import HELD, Finding, broken, not_checked
from faultlab.judge.records import Call, Capture
from faultlab.scenario.models import CaptureStep

_SETS_UP: Final = frozenset(
    {
        "workspace.create",
        "cuMemCreate",
        "cuMemExportToShareableHandle",
        "cuMemImportFromShareableHandle",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemAlloc",
        "cuMemFree",
        "cuMulticastCreate",
        "cuMulticastAddDevice",
        "cuMulticastBindMem",
        "cudart.cudaMalloc",
        "cudart.cudaFree",
        "fd.connect",
        "fd.send",
        "fd.recv",
        "comm.new_group",
    }
)
_INVALIDATED: Final = "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
_REFUSED: Final = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"


def check(facts: Facts) -> Finding:
    """Whether every capture recorded launches and nothing else."""
    if not any(isinstance(step, CaptureStep) for step in facts.scenario.workload):
        return not_checked("the workload captures nothing")
    captures = [(rank, each) for rank in facts.judged for each in rank.captures]
    if not captures:
        return not_checked("no rank that the scenario left alive began its capture")
    findings = [found for rank, each in captures if (found := _judge(rank, each)) is not None]
    return min(findings, key=_order, default=HELD)


def _order(finding: Finding) -> tuple[int, int]:
    assert finding.moment is not None
    return finding.moment.step, finding.moment.rank


def _judge(rank: RankFacts, capture: Capture) -> Finding | None:
    """The first thing that this capture holds and must not."""
    inside = [call for call in rank.calls if not call.lab and capture.holds(call.began)]
    for call in inside:
        if call.site in _SETS_UP:
            return broken(f"rank {rank.rank}: {_said(rank, call)} while a stream captured", call.began)
    if capture.error != _INVALIDATED or capture.ended is None:
        return None
    refused = next((call for call in inside if call.result == _REFUSED), None)
    text = f"rank {rank.rank}: the capture ended with {_INVALIDATED}"
    if refused is None:
        return broken(text, capture.ended)
    outer = next(call for call in inside if call is refused or _encloses(call, refused))
    which = "which" if outer is refused else f"where {refused.site}"
    return broken(f"{text}: {_said(rank, outer)}, {which} answered {_REFUSED}", outer.began)


def _encloses(outer: Call, inner: Call) -> bool:
    """Whether one call was made by the other."""
    if outer.began.thread != inner.began.thread or inner.ended is None or outer.began.n >= inner.began.n:
        return False
    return outer.ended is None or inner.ended.n < outer.ended.n


def _said(rank: RankFacts, call: Call) -> str:
    """``use #1 called workspace.create (mnnvl)``."""
    step = rank.step_at(call.began.step)
    site = f"{call.site} ({call.argument})" if call.argument else call.site
    return f"{step.title if step is not None else 'the subject'} called {site}"
