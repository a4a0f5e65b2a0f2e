"""The seam at NVML: the functions of ``pynvml``; its structs and constants stay."""

from __future__ import annotations

from typing import Any

from faultlab.errors import UnknownCall
from faultlab.seam.base import Seam
from faultlab.seam.conventions import NVML_CONVENTION
from faultlab.sites import SITES


def install(seam: Seam) -> None:
    """Replace ``pynvml``'s functions; those without a site are unknown calls."""
    import pynvml

    for name in dir(pynvml):
        member = getattr(pynvml, name)
        if not name.startswith("nvml") or isinstance(member, type) or not callable(member):
            continue
        setattr(pynvml, name, _function(seam, name) if name in SITES else seam.refuse(name))


#: Functions that give their code back instead of raising it (pynvml.py).
_RETURNING = frozenset({"nvmlSystemGetConfComputeSettings"})


def _function(seam: Seam, site: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        import pynvml

        if not seam.machine.knows(site):
            raise seam.unknown(site)
        try:
            return seam.injector.call(site, lambda: seam.machine.call(site, *args, **kwargs), NVML_CONVENTION)
        except UnknownCall as error:
            raise seam.unknown(f"{site}: {error}") from None
        except pynvml.NVMLError as error:
            if site in _RETURNING:
                return error.value
            raise

    call.__name__ = site
    return call
