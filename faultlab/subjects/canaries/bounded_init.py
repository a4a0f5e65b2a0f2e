"""Canaries of ``bounded_init``: a rank waits for a peer that will not come."""

from __future__ import annotations

from typing import ClassVar

from faultlab.subjects.canaries.base import Canary, Provocation


class NoPreflight(Canary):
    """Walks into FlashInfer's sequence without asking whether every rank can (pytorch#195596)."""

    breaks = frozenset({"bounded_init"})
    scenario: ClassVar[Provocation] = {
        "workspace": {"creation": "real"},
        "faults": [
            {"at": "cuMulticastAddDevice", "ranks": [1], "effect": {"error": "CUDA_ERROR_ILLEGAL_STATE"}}
        ],
    }

    def preflight(self, backend: str) -> None:
        return


CANARIES = {
    "no-preflight": NoPreflight,
}
