"""Canaries of ``fail_once``: a failure is not remembered."""

from __future__ import annotations

from typing import Any

from faultlab.subjects.canaries.base import CREATION_FAILS, Canary


class RetriesPerCall(Canary):
    """Forgets what failed, and tries it again at the next call (vllm#51986)."""

    breaks = frozenset({"fail_once"})
    scenario = CREATION_FAILS

    def create(self) -> Any:
        self._failed.clear()
        return super().create()


CANARIES = {
    "retries-per-call": RetriesPerCall,
}
