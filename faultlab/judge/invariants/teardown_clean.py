"""``teardown_clean``: destroy may be called twice, on half-built objects and at
interpreter exit; a failing destroy is contained and reported.

Promise: no destroy or exit step raises, whatever was struck inside it, and a
subject that logs says so when its workspace's destruction failed.
"""

from __future__ import annotations

from faultlab.judge.facts import Facts, RankFacts
from faultlab.judge.finding import HELD, Finding, broken, not_checked

_TEARDOWN = ("destroy", "exit")
_LOUD = ("WARNING", "ERROR", "CRITICAL")


def check(facts: Facts) -> Finding:
    """Whether every teardown ended quietly, and none of its failures silently."""
    asked = 0
    for rank in facts.judged:
        for step in rank.steps:
            if step.name not in _TEARDOWN or step.ended is None:
                continue
            asked += 1
            if step.error is not None:
                return broken(
                    f"rank {rank.rank}: {step.title} raised {step.error.title}: {step.error.text}", step.ended
                )
        silent = _silent_failure(rank)
        if silent is not None:
            return silent
    return HELD if asked else not_checked("the workload has no destroy or exit that came to its end")


def _silent_failure(rank: RankFacts) -> Finding | None:
    """A destruction that failed, and a subject that logs but did not say so."""
    if not rank.logs:
        return None
    for call in rank.calls:
        failed = call.site == "workspace.destroy" and not call.lab and call.ended is not None and not call.ok
        if not failed or call.argument.endswith("finalizer") or call.ended is None:
            continue
        if not any(log.level in _LOUD and log.moment.n > call.ended.n for log in rank.said):
            return broken(
                f"rank {rank.rank}: a destruction failed and nothing was logged about it", call.ended
            )
    return None
