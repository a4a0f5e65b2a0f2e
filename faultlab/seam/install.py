"""Puts every seam in place in this process: the one list of them."""

from __future__ import annotations

from faultlab.seam import comm, descriptors, driver, kernels, nvml, runtime, standin, workspace
from faultlab.seam.base import Seam
from faultlab.seam.comm import Groups


def install(seam: Seam) -> Groups:
    """Install all seams; the collectives' counters, which the rank program reads."""
    driver.install(seam)
    runtime.install(seam)
    nvml.install(seam)
    descriptors.install(seam)
    kernels.install(seam)
    mocked = seam.scenario.workspace.creation == "mocked"
    workspace.install(seam, create=standin.make_create(seam) if mocked else None)
    return comm.install(seam)
