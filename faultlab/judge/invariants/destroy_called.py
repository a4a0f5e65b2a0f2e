"""``destroy_called``: an invalid workspace is destroyed exactly once before the fallback starts.

Promise: for every object that creation returned although no kernel may be
given it, one ``workspace.destroy`` that names it comes before the next
``workspace.create`` or the first all-reduce on that rank. Where no fallback
starts, a destroy at the end of the workload is early enough. To judge another
kind of invalid object, extend ``records.Returned.invalid``.
"""

from __future__ import annotations

from faultlab.judge import wording
from faultlab.judge.facts import Facts, RankFacts
from faultlab.judge.finding import HELD, Finding, broken, not_checked
from faultlab.judge.paths import carries
from faultlab.judge.records import Call, Returned


def check(facts: Facts) -> Finding:
    """Whether every invalid object was destroyed once, in time."""
    objects = [(rank, each) for rank in facts.ranks for each in rank.returned]
    invalid = [(rank, each) for rank, each in objects if each.invalid]
    if not objects:
        return not_checked("creation returned no object")
    if not invalid:
        return not_checked("every object that creation returned was valid")
    findings = [_judge(rank, each) for rank, each in invalid]
    order = {"broken": 0, "not-checked": 1, "held": 2}
    return min(findings, key=lambda finding: (order[finding.state], _step(finding)))


def _step(finding: Finding) -> int:
    return finding.moment.step if finding.moment is not None else 0


def _judge(rank: RankFacts, returned: Returned) -> Finding:
    start = _fallback(rank, returned)
    what = f"rank {rank.rank}: the {returned.backend} workspace {returned.workspace} with a null pointer"
    if start is None and (rank.hung or rank.crash or rank.ended):
        return not_checked(f"{what} was given no time to be destroyed")
    if start is not None and _crashed_in(rank, start):
        return not_checked(f"{what} went into {start.site}, and no fallback began")
    end = start.began.n if start is not None else rank.last.n + 1
    count = _times_destroyed(rank, returned, end)
    if count == 1:
        return HELD
    often = f"was destroyed {wording.counted(count, 'time')}" if count else "was never destroyed"
    before = f"before {_title(start)} began" if start is not None else "by the end of the workload"
    return broken(f"{what} {often} {before}", start.began if start is not None else rank.last)


def _fallback(rank: RankFacts, returned: Returned) -> Call | None:
    """The call with which the fallback begins on this rank: a creation, or an all-reduce in a use."""
    uses = {step.index for step in rank.steps if step.name == "use"}
    for call in rank.calls:
        if call.began.n < returned.moment.n or call.lab:
            continue
        if call.site == "workspace.create" or (carries(call) and call.began.step in uses):
            return call
    return None


def _crashed_in(rank: RankFacts, call: Call) -> bool:
    """Whether the rank's crash came of this call: it was handed the object itself. A launch that a
    capture recorded is well until the replay."""
    if rank.crash is None or rank.crash.moment.n < call.began.n:
        return False
    return not call.ok or any(capture.holds(call.began) for capture in rank.captures)


def _times_destroyed(rank: RankFacts, returned: Returned, end: int) -> int:
    """Destroys that name the object. The workload's own destroy steps, which
    may come twice, count once, and only where nobody destroyed it before."""
    teardown = {step.index for step in rank.steps if step.name in ("destroy", "exit")}
    destroys = [
        call
        for call in rank.calls
        if call.site == "workspace.destroy"
        and call.argument == returned.workspace
        and not call.lab
        and returned.moment.n < call.began.n < end
    ]
    early = sum(call.began.step not in teardown for call in destroys)
    return early or min(1, len(destroys))


def _title(call: Call) -> str:
    return f"{call.site} ({call.argument})" if call.argument else call.site
