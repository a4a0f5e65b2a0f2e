"""Canaries of ``no_cuda_crash``: an unusable pointer reaches a kernel."""

from __future__ import annotations

from typing import Any

from faultlab.subjects.canaries.base import Canary


class PointerNotChecked(Canary):
    """Gives the kernel whatever creation returned (vllm#49043)."""

    seed = "null-mc-ptr[ranks=2,creation=mocked,faults.0.ranks=all]"
    breaks = frozenset({"no_cuda_crash"})

    def why_unusable(self, workspace: Any) -> str:
        return ""


class CheckedOnRankZero(Canary):
    """Rank 0 looks at its own pointer, and its word stands for all (pytorch#136577: the
    creator alone knew)."""

    seed = "null-mc-ptr[ranks=2,creation=mocked,faults.0.ranks=one]"
    breaks = frozenset({"no_cuda_crash"})

    def why_unusable(self, workspace: Any) -> str:
        return super().why_unusable(workspace) if self._environment.rank == 0 else ""


class UsedAfterDestroy(Canary):
    """A second owner that goes away destroys the workspace which the first still uses
    (vLLM's fusion pass in its ``__del__``, 0.33.0)."""

    seed = "no-fault[topology=hgx-h100-8,ranks=2,creation=mocked]"
    breaks = frozenset({"no_cuda_crash"})
    #: FlashInfer's own object has lost its attributes by then: an error that nobody declared.
    also_breaks = frozenset({"user_choice"})

    def create(self) -> Any:
        if self._workspace is not None:
            self._destroy(self._workspace)
        return super().create()


CANARIES: dict[str, type[Canary]] = {
    "pointer-not-checked": PointerNotChecked,
    "checked-on-rank-0": CheckedOnRankZero,
    "used-after-destroy": UsedAfterDestroy,
}
