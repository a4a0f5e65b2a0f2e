"""Canaries of ``no_leak``: something is not given back."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from faultlab.subjects.canaries.base import Canary
from faultlab.subjects.preflight import StepFailed

logger = logging.getLogger("faultlab.canaries")

_NO_FAULT = "no-fault[topology=hgx-h100-8,ranks=2,creation=mocked]"

#: Why set-up failed, for the whole process, as consumers keep it.
_WHY: dict[str, Exception] = {}


class NeverGivesBack(Canary):
    """Destroy does nothing, and the interpreter's end is meant to do it (SGLang 0.5.23
    has a clean-up that nobody calls)."""

    seed = _NO_FAULT
    breaks = frozenset({"no_leak"})

    def destroy(self) -> None:
        return


class TrustsDestroy(Canary):
    """Calls FlashInfer's ``destroy()`` and believes it: for trtllm it frees nothing
    (vllm#51986: memory lost at every try)."""

    seed = "no-fault[topology=pcie-4,ranks=2,creation=real]"
    breaks = frozenset({"no_leak"})

    def _destroy(self, workspace: Any) -> None:
        try:
            workspace.destroy()
        except Exception as error:
            logger.warning("rank %d: destroying failed: %s", self._environment.rank, error)


class KeepsTheException(Canary):
    """Refuses the invalid object by raising, leaves it to its finalizer, and keeps the
    exception: the frames of its traceback hold the object for good (flashinfer#2546:
    half-built objects left to their destructors)."""

    seed = "null-mc-ptr[ranks=2,creation=mocked,faults.0.ranks=all]"
    breaks = frozenset({"destroy_called", "no_leak"})

    def _voted(self, name: str, make: Callable[[], Any]) -> Any:
        def checked() -> Any:
            workspace = make()
            problem = self.why_unusable(workspace)
            if problem:
                raise RuntimeError(problem)
            return workspace

        def remembered() -> Any:
            try:
                return checked()
            except Exception as error:
                _WHY[name] = error
                raise

        return super()._voted(name, remembered)


class LeavesAFolder(Canary):
    """A temporary folder per creation stays behind (vLLM 0.33.0 with FlashInfer 0.7.2.post1,
    where rank 0 has no multicast)."""

    seed = _NO_FAULT
    breaks = frozenset({"no_leak"})

    def create(self) -> Any:
        tempfile.mkdtemp(prefix="canary-")
        return super().create()


class LeavesASocket(Canary):
    """The socket on which descriptors came is closed where all went well, and stays open
    after a failure (the failure path of FlashInfer's exchange, 0.7.2.post1)."""

    seed = "multicast-exception[effect=not-supported,case=mocked-all,ranks=2]"
    breaks = frozenset({"no_leak"})

    def _try(self, backend: str) -> bool:
        listening = socket.socket(socket.AF_UNIX)
        worked = super()._try(backend)
        if worked:
            listening.close()
        else:
            listening.detach()
        return worked


class LeavesADescriptor(Canary):
    """Forgets the exported descriptor where the rung is refused (FlashInfer 0.7.2.post1
    after a failed exchange; MoonEP#28: a probe is to leak nothing)."""

    seed = "out-of-memory[topology=pcie-4,ranks=2]"
    breaks = frozenset({"no_leak"})

    def preflight(self, backend: str) -> None:
        descriptor = os.memfd_create("canary")
        try:
            super().preflight(backend)
        except StepFailed:
            raise
        else:
            os.close(descriptor)


class LeavesAThread(Canary):
    """A watchdog thread per creation, to break a rendezvous that hangs, outlives it
    (sglang#29073 asks for a limit of time)."""

    seed = _NO_FAULT
    breaks = frozenset({"no_leak"})

    def create(self) -> Any:
        threading.Thread(target=threading.Event().wait, name="canary-watchdog", daemon=True).start()
        return super().create()


CANARIES: dict[str, type[Canary]] = {
    "never-gives-back": NeverGivesBack,
    "trusts-destroy": TrustsDestroy,
    "keeps-the-exception": KeepsTheException,
    "leaves-a-folder": LeavesAFolder,
    "leaves-a-socket": LeavesASocket,
    "leaves-a-descriptor": LeavesADescriptor,
    "leaves-a-thread": LeavesAThread,
}
