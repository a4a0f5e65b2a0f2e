"""The one list of invariants: every name of the contract, and the check that judges it.

Promise: ``judge_all`` answers for all fifteen names, in the contract's order. A
name without a check is ``not-checked: not built yet``; a check that itself fails
is reported as such and makes the verdict ``unknown``, never a pass.

To add an invariant: write ``invariants/<name>.py`` with ``check(facts) -> Finding``
and put it into ``CHECKS``; its name is in ``scenario.invariants`` already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from faultlab.judge.cascade import stop_of, without_cascades
from faultlab.judge.facts import Facts
from faultlab.judge.finding import Finding, not_checked
from faultlab.judge.invariants import (
    best_fallback,
    bounded_init,
    capture_safe,
    clear_log,
    comms_alive,
    correct_result,
    destroy_called,
    fail_once,
    no_cuda_crash,
    no_leak,
    ranks_agree,
    state_neutral,
    teardown_clean,
    truthful_ready,
    user_choice,
)
from faultlab.scenario.invariants import INVARIANTS

Check = Callable[[Facts], Finding]

CHECKS: Final[dict[str, Check]] = {
    "no_cuda_crash": no_cuda_crash.check,
    "bounded_init": bounded_init.check,
    "ranks_agree": ranks_agree.check,
    "no_leak": no_leak.check,
    "comms_alive": comms_alive.check,
    "correct_result": correct_result.check,
    "destroy_called": destroy_called.check,
    "truthful_ready": truthful_ready.check,
    "fail_once": fail_once.check,
    "state_neutral": state_neutral.check,
    "teardown_clean": teardown_clean.check,
    "user_choice": user_choice.check,
    "clear_log": clear_log.check,
    "best_fallback": best_fallback.check,
    "capture_safe": capture_safe.check,
}

NOT_BUILT: Final = not_checked("not built yet")
_FAILED: Final = "the check itself failed"

assert set(CHECKS) <= set(INVARIANTS), "an invariant that the contract does not name"


def judge_all(facts: Facts) -> dict[str, Finding]:
    """Every invariant's finding for a run."""
    stop = stop_of(facts)
    return {
        name: without_cascades(name, _guarded(CHECKS[name], facts), stop) if name in CHECKS else NOT_BUILT
        for name in INVARIANTS
    }


def failed(finding: Finding) -> bool:
    """Whether this is no finding at all: the check raised."""
    return finding.state == "not-checked" and finding.reason.startswith(_FAILED)


def _guarded(check: Check, facts: Facts) -> Finding:
    try:
        return check(facts)
    except Exception as error:
        return not_checked(f"{_FAILED}: {type(error).__name__}: {error}")
