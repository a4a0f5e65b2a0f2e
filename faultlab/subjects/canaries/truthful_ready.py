"""Canaries of ``truthful_ready``: "created" is said where it is not so."""

from __future__ import annotations

from typing import Any

from faultlab.subjects.canaries.base import SHORT, Canary
from faultlab.subjects.reference import Reference


class ReadyWhereItWorked(Canary):
    """Each rank reports its own success: one raises what its peers never hear of."""

    breaks = frozenset({"ranks_agree", "truthful_ready"})
    scenario = SHORT
    declared_errors = (*Reference.declared_errors, MemoryError)

    def create(self) -> Any:
        workspace = super().create()
        if self._environment.rank == 1:
            self.destroy()
            raise MemoryError("only on this rank")
        return workspace


CANARIES = {
    "own-success": ReadyWhereItWorked,
}
