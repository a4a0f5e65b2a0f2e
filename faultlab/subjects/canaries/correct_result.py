"""Canaries of ``correct_result``: the sum is wrong."""

from __future__ import annotations

import torch

from faultlab.subjects.canaries.base import Canary


class WrongSum(Canary):
    """Returns something near the sum."""

    breaks = frozenset({"correct_result"})

    def use(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().use(tensor) + 1


CANARIES = {
    "wrong-sum": WrongSum,
}
