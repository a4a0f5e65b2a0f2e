"""Canaries of ``capture_safe``: something is set up while a stream captures."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any, Final

import torch

from faultlab.subjects.canaries.base import Canary
from faultlab.subjects.reference import Reference

_CAPTURED_BEFORE: Final = "capture[ranks=2,workload=captured-before,case=no-fault]"
_CREATED_BEFORE: Final = "capture[ranks=2,workload=created-before,case=no-fault]"


class CreatesInCapture(Canary):
    """Sets up whenever it is asked to, with its preflight and its votes (vllm#55973)."""

    breaks = frozenset({"capture_safe"})
    seed = _CAPTURED_BEFORE

    def capturing(self) -> bool:
        return False


class CreatesWithoutAVote(CreatesInCapture):
    """Creates in the capture and asks nobody, which fails, and then once more after it (vllm#55973)."""

    breaks = frozenset({"capture_safe", "fail_once"})

    def preflight(self, backend: str) -> None:
        if not Reference.capturing(self):
            super().preflight(backend)

    def _voted(self, name: str, make: Any) -> Any:
        return make() if Reference.capturing(self) else super()._voted(name, make)


class RegistersPerUse(Canary):
    """Allocates what it registers at each use, also in a capture, and contains the failure (vllm#54626)."""

    breaks = frozenset({"capture_safe"})
    seed = _CREATED_BEFORE

    def use(self, tensor: torch.Tensor) -> torch.Tensor:
        from flashinfer.comm.cuda_ipc import cudart

        with contextlib.suppress(RuntimeError):
            pointer = cudart.cudaMalloc(64)
            cudart.cudaFree(ctypes.c_void_p(pointer.value))
        return super().use(tensor)


class RetriesInCapture(CreatesWithoutAVote):
    """Tries in the capture what failed before it (vllm#55973)."""

    breaks = frozenset({"capture_safe", "fail_once"})
    seed = "capture[ranks=2,workload=created-before,case=refused]"

    def use(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._workspace is None and Reference.capturing(self):
            self._failed.clear()
            with contextlib.suppress(RuntimeError):
                self.create()
        return super().use(tensor)


class WaitsForTheDevice(Canary):
    """Waits for the device after each launch, to see whether it failed (no capture survives
    it: CUDA programming guide, "Prohibited and Unhandled Operations")."""

    breaks = frozenset({"capture_safe"})
    seed = _CREATED_BEFORE

    def use(self, tensor: torch.Tensor) -> torch.Tensor:
        result = super().use(tensor)
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()
        return result


CANARIES = {
    "creates": CreatesInCapture,
    "creates-without-a-vote": CreatesWithoutAVote,
    "registers-per-use": RegistersPerUse,
    "retries": RetriesInCapture,
    "waits": WaitsForTheDevice,
}
