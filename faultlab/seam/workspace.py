"""The seam at FlashInfer's workspace interface: create, destroy, and the pointers read.

``workspace.create`` and ``workspace.destroy`` are whole steps; the constructors
open the windows ``mnnvl`` and ``trtllm`` that a fault's ``during`` names. Every
object that creation returns gets an id, which its destruction names again.
"""

from __future__ import annotations

import itertools
import sys
from types import FrameType
from typing import Any

from faultlab.seam import standin
from faultlab.seam.base import Seam
from faultlab.seam.conventions import RAISING, STEP

_ID = "_faultlab_id"


def install(seam: Seam) -> None:
    """Replace FlashInfer's creation function by the reported one."""
    import flashinfer.comm
    from flashinfer.comm import allreduce, mnnvl
    from flashinfer.comm.allreduce import TRTLLMAllReduceFusionWorkspace
    from flashinfer.comm.trtllm_mnnvl_ar import MNNVLAllReduceFusionWorkspace

    reported = _create(seam, allreduce.create_allreduce_fusion_workspace)
    allreduce.create_allreduce_fusion_workspace = reported
    flashinfer.comm.create_allreduce_fusion_workspace = reported
    for window, kind in (
        ("mnnvl", MNNVLAllReduceFusionWorkspace),
        ("trtllm", TRTLLMAllReduceFusionWorkspace),
    ):
        _constructor(seam, kind, window)
        report_destroy(seam, kind, window)
    _multicast_pointer(seam, mnnvl.SymmDeviceMemory)


def _create(seam: Seam, original: Any) -> Any:
    numbers = itertools.count()
    mocked = standin.make_create(seam)

    def create_allreduce_fusion_workspace(*args: Any, **kwargs: Any) -> Any:
        backend = str(args[0] if args else kwargs.get("backend", "auto"))
        seam.creations[backend] += 1
        make = mocked if seam.scenario.workspace.creation == "mocked" else original
        workspace = seam.injector.call(
            "workspace.create", lambda: make(*args, **kwargs), STEP, argument=backend
        )
        if workspace is not None:
            _returned(seam, workspace, next(numbers))
        return workspace

    return create_allreduce_fusion_workspace


def _returned(seam: Seam, workspace: Any, number: int) -> None:
    """Creation returned an object: name it, let its pointer be struck, report it."""
    setattr(workspace, _ID, f"w{number}")
    if getattr(workspace, "mc_ptr", None) is not None:
        workspace.mc_ptr = read(seam, "workspace.mc_ptr", workspace.mc_ptr)
    pointer = getattr(workspace, "mc_ptr", None) if workspace.backend == "mnnvl" else None
    seam.link.emit(
        "workspace",
        workspace=f"w{number}",
        backend=workspace.backend,
        creation=seam.scenario.workspace.creation,
        mc_ptr=None if pointer is None else int(pointer),
        needs_multicast=workspace.backend == "mnnvl",
    )


def read(seam: Seam, site: str, true: Any) -> Any:
    """A value that is read: the true one, or the struck one."""

    return seam.injector.call(site, lambda: true, RAISING, replace=lambda value: value)


def _constructor(seam: Seam, kind: Any, window: str) -> None:
    original = kind.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        with seam.context.in_window(window):
            original(self, *args, **kwargs)

    kind.__init__ = __init__


def report_destroy(seam: Seam, kind: Any, window: str) -> None:
    """Make ``destroy`` of this class a site that names its object."""
    original = kind.destroy

    def destroy(self: Any) -> Any:
        with seam.context.in_window(window):
            return seam.injector.call(
                "workspace.destroy",
                lambda: original(self),
                STEP,
                argument=self.__dict__.get(_ID, "") + _finalizer(sys._getframe(1)),
            )

    kind.destroy = destroy


def _finalizer(caller: FrameType) -> str:
    """A mark for a call that nobody made: FlashInfer's ``__del__`` destroys what
    was not destroyed (workspace_base.py)."""
    return " by its finalizer" if caller.f_code.co_name == "__del__" else ""


def _multicast_pointer(seam: Seam, kind: Any) -> None:
    original = kind.get_multicast_ptr

    def get_multicast_ptr(self: Any) -> int:
        return int(read(seam, "symm.multicast_ptr", original(self)))

    kind.get_multicast_ptr = get_multicast_ptr
