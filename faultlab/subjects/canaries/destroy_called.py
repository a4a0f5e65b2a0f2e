"""Canaries of ``destroy_called``: an invalid workspace is not destroyed once, in time."""

from __future__ import annotations

from typing import Any

from faultlab.subjects.canaries.base import Canary

_NULL_POINTER = "null-mc-ptr[ranks=2,creation=mocked,faults.0.ranks=all]"


class DropsTheInvalid(Canary):
    """Finds the null pointer and forgets the object without destroying it (vllm#49043)."""

    seed = _NULL_POINTER
    breaks = frozenset({"destroy_called"})

    def _destroy(self, workspace: Any) -> None:
        if self.why_unusable(workspace):
            return
        super()._destroy(workspace)


class DestroysTwice(Canary):
    """Destroys what it found invalid where it found it, and once more in the clean-up
    that every failure goes through (flashinfer#2659: destroy once)."""

    seed = _NULL_POINTER
    breaks = frozenset({"destroy_called"})

    def _destroy(self, workspace: Any) -> None:
        if self.why_unusable(workspace):
            super()._destroy(workspace)
        super()._destroy(workspace)


class DestroysAtTheEnd(Canary):
    """Puts the invalid object aside, to be destroyed with the rest: the fallback starts
    while it holds its memory (vllm#49043)."""

    seed = _NULL_POINTER
    breaks = frozenset({"destroy_called"})

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self._aside: list[Any] = []

    def _destroy(self, workspace: Any) -> None:
        if self.why_unusable(workspace):
            self._aside.append(workspace)
        else:
            super()._destroy(workspace)

    def destroy(self) -> None:
        super().destroy()
        while self._aside:
            super()._destroy(self._aside.pop())


CANARIES: dict[str, type[Canary]] = {
    "drops-the-invalid": DropsTheInvalid,
    "destroys-twice": DestroysTwice,
    "destroys-at-the-end": DestroysAtTheEnd,
}
