"""Canaries of ``correct_result``: the sum is wrong."""

from __future__ import annotations

import torch

from faultlab.subjects.canaries.base import Canary


class WrongSum(Canary):
    """Returns something near the sum (vllm#45721)."""

    seed = "no-fault[topology=hgx-h100-8,ranks=2,creation=mocked]"
    breaks = frozenset({"correct_result"})

    def use(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().use(tensor) + 1


class StaleOnOneRank(Canary):
    """One rank hands out the buffer of the call before, and its sums (FlashInfer 0.6.10 to
    0.7.4: a table keyed by an object's id may keep the old buffers)."""

    seed = "no-fault[topology=pcie-4,ranks=2,creation=mocked]"
    breaks = frozenset({"correct_result"})

    _earlier: torch.Tensor | None = None

    def use(self, tensor: torch.Tensor) -> torch.Tensor:
        result = super().use(tensor)
        stale, self._earlier = self._earlier, result
        return stale if stale is not None and self._environment.rank == 1 else result


class FallbackReducesNothing(Canary):
    """The fused path is off, and nobody reduces in its place (sglang#32963: the fused
    reduction covered a part of the group, and the rest was lost without an error)."""

    seed = "creation-exception[topology=pcie-4,ranks=2,case=mocked-all]"
    breaks = frozenset({"correct_result"})

    def use(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if self._workspace is None else super().use(tensor)


CANARIES: dict[str, type[Canary]] = {
    "wrong-sum": WrongSum,
    "stale-on-one-rank": StaleOnOneRank,
    "fallback-reduces-nothing": FallbackReducesNothing,
}
