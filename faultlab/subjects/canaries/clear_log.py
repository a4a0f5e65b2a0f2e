"""Canaries of ``clear_log``: a user cannot tell from the log what happened."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from faultlab.subjects.canaries.base import Canary
from faultlab.subjects.reference import logger

_own = logging.getLogger("faultlab.canary")


@contextmanager
def _hushed() -> Iterator[None]:
    """The reference says nothing in here."""
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


class HidesTheError(Canary):
    """Says what happened where nobody looks: at DEBUG, and is silently slow from then on
    (TensorRT-LLM's AllReduce)."""

    seed = "null-mc-ptr[ranks=2,creation=mocked,faults.0.ranks=all]"
    breaks = frozenset({"clear_log"})
    #: The same silence covers a destruction that fails on the way.
    also_breaks = frozenset({"teardown_clean"})

    def _try(self, backend: str) -> bool:
        with _hushed():
            worked = super()._try(backend)
        if not worked:
            _own.debug("%s is not used: %s", backend, self._failed[backend])
        return worked


class SaysOnlyThatItFailed(Canary):
    """Says that it failed, and neither where nor with what (pie#500: a generic error)."""

    seed = "creation-exception[topology=pcie-4,ranks=2,case=mocked-all]"
    breaks = frozenset({"clear_log"})

    def _try(self, backend: str) -> bool:
        with _hushed():
            worked = super()._try(backend)
        if not worked:
            _own.warning("fused all-reduce is off")
        return worked


class SaysItPerCall(Canary):
    """Warns again at every all-reduce, once a layer in a model (vllm#51986)."""

    seed = "creation-exception[topology=pcie-4,ranks=2,case=mocked-all]"
    breaks = frozenset({"clear_log"})

    def use(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._workspace is None:
            _own.warning("rank %d: the plain all-reduce is used: %s", self._environment.rank, self._failed)
        return super().use(tensor)


class CallsAnAttemptAnError(Canary):
    """An attempt that failed on the way to a rung that works is an ERROR (vllm#55127)."""

    seed = "null-mc-ptr[ranks=2,creation=mocked,faults.0.ranks=all]"
    breaks = frozenset({"clear_log"})

    def _try(self, backend: str) -> bool:
        with _hushed():
            worked = super()._try(backend)
        if not worked:
            reason = self._failed[backend]
            _own.error("rank %d: %s is not used: %s", self._environment.rank, backend, reason)
        return worked


class CriesWolf(Canary):
    """Warns of a failure, and then all works: the log of every clean start is alarming
    (a softer text was wanted in vllm#37662)."""

    seed = "destroy-failure[topology=hgx-h100-8,ranks=2,creation=mocked,effect=raises]"
    breaks = frozenset({"clear_log"})

    def create(self) -> Any:
        if self._workspace is None:
            _own.warning("mnnvl may be unavailable on this system")
        return super().create()


CANARIES: dict[str, type[Canary]] = {
    "hides-the-error": HidesTheError,
    "only-failed": SaysOnlyThatItFailed,
    "per-call": SaysItPerCall,
    "an-attempt-is-an-error": CallsAnAttemptAnError,
    "cries-wolf": CriesWolf,
}
