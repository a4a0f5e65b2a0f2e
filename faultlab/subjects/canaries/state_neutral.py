"""Canaries of ``state_neutral``: the caller's state changes."""

from __future__ import annotations

import random
from typing import Any

import torch

from faultlab.subjects.canaries.base import Canary


class ReseedsTheRandomState(Canary):
    """Seeds the caller's generator for a socket's name and leaves it so."""

    breaks = frozenset({"state_neutral"})

    def create(self) -> Any:
        random.seed(1234)
        return super().create()


class ChangesTheDefaultDtype(Canary):
    """Leaves torch's default dtype changed."""

    breaks = frozenset({"state_neutral"})

    def create(self) -> Any:
        torch.set_default_dtype(torch.float64)
        return super().create()


CANARIES = {
    "reseeds": ReseedsTheRandomState,
    "default-dtype": ChangesTheDefaultDtype,
}
