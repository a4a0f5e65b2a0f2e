"""Canaries of ``state_neutral``: the caller's state changes."""

from __future__ import annotations

import os
import random
from typing import Any

import torch

from faultlab.subjects.canaries.base import Canary

_NO_FAULT = "no-fault[topology=hgx-h100-8,ranks=2,creation=mocked]"


class ReseedsTheRandomState(Canary):
    """Seeds the caller's generator for a socket's name and leaves it so (flashinfer#3102,
    vllm#36674)."""

    seed = _NO_FAULT
    breaks = frozenset({"state_neutral"})

    def create(self) -> Any:
        random.seed(1234)
        return super().create()


class ReseedsTorch(Canary):
    """Restores Python's generator and forgets torch's (vLLM handles Python's alone)."""

    seed = _NO_FAULT
    breaks = frozenset({"state_neutral"})

    def create(self) -> Any:
        torch.manual_seed(1234)
        return super().create()


class ChangesTheDefaultDtype(Canary):
    """Leaves torch's default dtype as the set-up of its own tensors needed it (LightLLM#1286's
    kind: the caller's global state is borrowed and not given back)."""

    seed = _NO_FAULT
    breaks = frozenset({"state_neutral"})

    def create(self) -> Any:
        torch.set_default_dtype(torch.float64)
        return super().create()


class SwitchesMulticastOff(Canary):
    """Once multicast failed, switches it off for everything in the process by the
    environment (pytorch#177472: NCCL_NVLS_ENABLE=0 by hand)."""

    seed = "multicast-exception[effect=not-supported,case=mocked-all,ranks=2]"
    breaks = frozenset({"state_neutral"})

    def create(self) -> Any:
        workspace = super().create()
        if self._failed:
            os.environ["NCCL_NVLS_ENABLE"] = "0"
        return workspace


class LeavesAnotherDevice(Canary):
    """Asks every device of the node whether it can, and stays on the last one
    (vllm#33274: probes before any allocation)."""

    seed = _NO_FAULT
    breaks = frozenset({"state_neutral"})

    def exit(self) -> None:
        super().exit()
        torch.cuda.set_device(torch.cuda.device_count() - 1)


class LeavesInferenceMode(Canary):
    """Goes into inference mode for its workspace tensors and out of it only where creation
    worked (LightLLM#1286's kind)."""

    seed = "creation-exception[topology=pcie-4,ranks=2,case=mocked-all]"
    breaks = frozenset({"state_neutral"})

    def _try(self, backend: str) -> bool:
        self._mode = torch.inference_mode()
        self._mode.__enter__()
        worked = super()._try(backend)
        if worked:
            self._mode.__exit__(None, None, None)
        return worked


CANARIES: dict[str, type[Canary]] = {
    "reseeds": ReseedsTheRandomState,
    "reseeds-torch": ReseedsTorch,
    "default-dtype": ChangesTheDefaultDtype,
    "environment": SwitchesMulticastOff,
    "current-device": LeavesAnotherDevice,
    "inference-mode": LeavesInferenceMode,
}
