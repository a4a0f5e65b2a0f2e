"""The fifteen promises of a clean fallback, by name, in the design's order.

What each one means is in the design (the clean-fallback contract); how each is
judged is the judge's work. Here stand only the names, so that checking a file
loads nothing else.
"""

from __future__ import annotations

from typing import Final

INVARIANTS: Final[tuple[str, ...]] = (
    "no_cuda_crash",
    "bounded_init",
    "ranks_agree",
    "truthful_ready",
    "no_leak",
    "comms_alive",
    "correct_result",
    "destroy_called",
    "fail_once",
    "state_neutral",
    "clear_log",
    "teardown_clean",
    "best_fallback",
    "user_choice",
    "capture_safe",
)

assert len(set(INVARIANTS)) == 15
