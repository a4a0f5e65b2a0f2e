"""Canaries of ``teardown_clean``: an end that fails is not contained."""

from __future__ import annotations

from typing import Any, ClassVar

from faultlab.subjects.canaries.base import Canary, Provocation


class DestroyErrorEscapes(Canary):
    """An error of destroy goes to whoever tears the engine down (vLLM 0.33.0)."""

    breaks = frozenset({"teardown_clean"})
    scenario: ClassVar[Provocation] = {
        "faults": [{"at": "workspace.destroy", "calls": 1, "effect": {"raise": "RuntimeError"}}]
    }

    def _destroy(self, workspace: Any) -> None:
        workspace.destroy()


CANARIES = {
    "error-escapes": DestroyErrorEscapes,
}
