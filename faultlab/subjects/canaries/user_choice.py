"""Canaries of ``user_choice``: an order is not followed."""

from __future__ import annotations

from typing import Any, ClassVar

from faultlab.subjects.canaries.base import Canary, Provocation


class ReplacesTheChoice(Canary):
    """Gives trtllm to a user who ordered mnnvl."""

    breaks = frozenset({"user_choice"})
    scenario: ClassVar[Provocation] = {
        "workspace": {"creation": "mocked", "backend": "mnnvl"},
        "faults": [{"at": "workspace.create", "calls": 1, "effect": {"error": "CUDA_ERROR_NOT_SUPPORTED"}}],
    }

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self._ladder = ("mnnvl", "trtllm")


CANARIES = {
    "replaces": ReplacesTheChoice,
}
