"""Canaries of ``no_cuda_crash``: an unusable pointer reaches a kernel."""

from __future__ import annotations

from typing import Any

from faultlab.subjects.canaries.base import NULL_POINTER, Canary


class PointerNotChecked(Canary):
    """Gives the kernel whatever creation returned (vllm#49043)."""

    breaks = frozenset({"no_cuda_crash"})
    scenario = NULL_POINTER

    def why_unusable(self, workspace: Any) -> str:
        return ""


CANARIES = {
    "pointer-not-checked": PointerNotChecked,
}
