"""Canaries of ``destroy_called``: an invalid workspace is not destroyed."""

from __future__ import annotations

from typing import Any

from faultlab.subjects.canaries.base import NULL_POINTER, Canary


class DropsTheInvalid(Canary):
    """Finds the null pointer and forgets the object without destroying it."""

    breaks = frozenset({"destroy_called"})
    scenario = NULL_POINTER

    def _destroy(self, workspace: Any) -> None:
        if self.why_unusable(workspace):
            return
        super()._destroy(workspace)


CANARIES = {
    "drops-the-invalid": DropsTheInvalid,
}
