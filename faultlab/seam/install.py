"""Puts every seam in place in this process: the one list of them."""

from __future__ import annotations

from functools import cache

from faultlab.seam import comm, descriptors, driver, kernels, nvml, runtime, workspace
from faultlab.seam.base import Seam

_SEAMS = (driver, runtime, nvml, descriptors, kernels, workspace, comm)


@cache
def installed() -> Seam:
    """The seam of this process, in place from the first call on. A forkserver calls
    this before it forks, so that its ranks do not each pay for it."""
    seam = Seam()
    for module in _SEAMS:
        module.install(seam)
    return seam
