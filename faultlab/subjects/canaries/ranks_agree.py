"""Canaries of ``ranks_agree``: the ranks decide for themselves."""

from __future__ import annotations

from typing import Any

from faultlab.subjects.canaries.base import SHORT, Canary


class FallsBackAlone(Canary):
    """One rank changes its mind after the vote and tells nobody."""

    breaks = frozenset({"ranks_agree", "truthful_ready"})
    scenario = SHORT

    def create(self) -> Any:
        workspace = super().create()
        if self._environment.rank == 1:
            self.destroy()
            return None
        return workspace


CANARIES = {
    "falls-back-alone": FallsBackAlone,
}
