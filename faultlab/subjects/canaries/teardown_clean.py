"""Canaries of ``teardown_clean``: an end that fails is not contained, or not told."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from faultlab.subjects.canaries.base import Canary
from faultlab.subjects.reference import leftovers_of

logger = logging.getLogger("faultlab.canaries")

_DESTROY_FAILS = "destroy-failure[topology=hgx-h100-8,ranks=2,creation=mocked,effect=raises]"


class DestroyErrorEscapes(Canary):
    """An error of destroy goes to whoever tears the engine down (vLLM 0.33.0)."""

    seed = _DESTROY_FAILS
    breaks = frozenset({"teardown_clean"})

    def _destroy(self, workspace: Any) -> None:
        leftovers = leftovers_of(workspace)
        try:
            workspace.destroy()
        finally:
            for release in leftovers:
                release()


class SaysNothing(Canary):
    """Swallows the error of a destruction and says it was done (nccl#2117)."""

    seed = _DESTROY_FAILS
    breaks = frozenset({"teardown_clean"})

    def _destroy(self, workspace: Any) -> None:
        for release in (workspace.destroy, *leftovers_of(workspace)):
            with suppress(Exception):
                release()


class OnlyOnce(Canary):
    """A second destroy meets an attribute that the first has taken away (vLLM 0.33.0,
    flashinfer#2659)."""

    seed = "no-fault[topology=hgx-h100-8,ranks=2,creation=mocked]"
    breaks = frozenset({"teardown_clean"})

    def destroy(self) -> None:
        logger.info("destroying the %s workspace", self._workspace.backend)
        super().destroy()


CANARIES: dict[str, type[Canary]] = {
    "error-escapes": DestroyErrorEscapes,
    "says-nothing": SaysNothing,
    "only-once": OnlyOnce,
}
