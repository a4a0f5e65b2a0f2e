"""How the simulated calls are registered, and how a library says that one failed.

A driver call is a function that takes the machine and the arguments of the
function of the same name in ``cuda.bindings.driver``, by the same names, and
returns the same tuple.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

import pynvml
from cuda.bindings import driver as cuda

from faultlab.codes import CUDA, NVML
from faultlab.sites import SITES

if TYPE_CHECKING:
    from faultlab.machine.simulated.machine import SimulatedMachine

Call = Callable[..., Any]

#: Every driver call that the simulated machine knows, by the name of its site.
DRIVER: dict[str, Call] = {}
OK: Final = cuda.CUresult.CUDA_SUCCESS


def driver_call(function: Call) -> Call:
    """Register a driver call that needs no context: it works on objects of the
    process, or only asks the host side (recorded: such calls go on after error 700)."""
    return _register(function.__name__, function)


def context_call(function: Call) -> Call:
    """Register a driver call that needs a current context; without one it answers
    201 (cuda.h, CUDA_ERROR_INVALID_CONTEXT)."""
    site = function.__name__

    @wraps(function)
    def in_context(machine: SimulatedMachine, *args: Any, **kwargs: Any) -> Any:
        if machine.current_device is None:
            return fail(site, "CUDA_ERROR_INVALID_CONTEXT")
        return function(machine, *args, **kwargs)

    return _register(site, in_context)


def _register(site: str, function: Call) -> Call:
    assert site in SITES and SITES[site].domain == "driver", site
    DRIVER[site] = function
    return function


def fail(site: str, error: str) -> tuple[Any, ...]:
    """What the binding returns for an error: the code, and None for every value."""
    return (cuda.CUresult(CUDA[error]), *[None] * SITES[site].outputs)


def answer(site: str, error: str) -> tuple[Any, ...]:
    """What a call without values returns: ``error`` by name, empty for success."""
    return fail(site, error) if error else (OK,)


def nvml_error(name: str) -> Exception:
    """The exception that ``pynvml`` raises for an error, of the subclass it has."""
    made: Exception = pynvml.NVMLError(NVML[name])
    return made


def refuse(site: str, error: str) -> Any:
    """What any call answers that this topology refuses (``does.refuses``)."""
    domain = SITES[site].domain
    if domain == "nvml":
        raise nvml_error(error)
    if domain == "runtime":
        return (CUDA[error], None)
    assert domain == "driver", f"a {domain} is not refused by a topology"
    return fail(site, error)
