"""Canaries of ``best_fallback``: a rung that would have worked is passed by."""

from __future__ import annotations

from typing import Any

from faultlab.subjects.canaries.base import Canary


class GivesUpAtOnce(Canary):
    """Multicast is missing, and everything is turned off, trtllm too, which needs none
    (sglang#30364)."""

    seed = "null-mc-ptr[ranks=2,creation=mocked,faults.0.ranks=all]"
    breaks = frozenset({"best_fallback"})

    def create(self) -> Any:
        if self._environment.backend == "auto":
            self._ladder = self._ladder[:1]
        return super().create()


class StartsLow(Canary):
    """Takes trtllm without asking for mnnvl, whatever the machine has (vLLM 0.23.0's
    automatic choice on one node)."""

    seed = "destroy-failure[topology=hgx-h100-8,ranks=2,creation=mocked,effect=raises]"
    breaks = frozenset({"best_fallback"})

    def create(self) -> Any:
        if self._environment.backend == "auto":
            self._ladder = ("trtllm",)
        return super().create()


CANARIES: dict[str, type[Canary]] = {
    "gives-up-at-once": GivesUpAtOnce,
    "starts-low": StartsLow,
}
