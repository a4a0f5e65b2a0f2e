"""Canaries of ``teardown_clean``: an end that fails is not contained, or not told."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from faultlab.subjects.canaries.base import Canary

_DESTROY_FAILS = "destroy-failure[topology=hgx-h100-8,ranks=2,creation=mocked,effect=raises]"


class DestroyErrorEscapes(Canary):
    """An error of destroy goes to whoever tears the engine down (vLLM 0.33.0)."""

    seed = _DESTROY_FAILS
    breaks = frozenset({"teardown_clean"})

    def _destroy(self, workspace: Any) -> None:
        workspace.destroy()


class SaysNothing(Canary):
    """Swallows the error of a destruction and says it was done (nccl#2117)."""

    seed = _DESTROY_FAILS
    breaks = frozenset({"teardown_clean"})

    def _destroy(self, workspace: Any) -> None:
        with suppress(Exception):
            workspace.destroy()


class OnlyOnce(Canary):
    """A second destroy meets an attribute that the first has taken away (vLLM 0.33.0,
    flashinfer#2659)."""

    seed = "no-fault[topology=hgx-h100-8,ranks=2,creation=mocked]"
    breaks = frozenset({"teardown_clean"})

    def destroy(self) -> None:
        workspace, self._workspace = self._workspace, None
        workspace.destroy()


CANARIES: dict[str, type[Canary]] = {
    "error-escapes": DestroyErrorEscapes,
    "says-nothing": SaysNothing,
    "only-once": OnlyOnce,
}
