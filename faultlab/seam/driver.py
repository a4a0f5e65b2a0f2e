"""The seam at ``cuda.bindings.driver``: every function of the module.

FlashInfer and its users call the driver through attributes of this module, so
replacing the attributes puts the lab below all of them. The module's types and
enums need no driver and stay. A function that no site names is an unknown call.
"""

from __future__ import annotations

from typing import Any

from faultlab.codes import CUDA, name_of
from faultlab.errors import UnknownCall
from faultlab.seam.base import Seam
from faultlab.seam.conventions import DRIVER
from faultlab.sites import ATTRIBUTES, SITES

_ATTRIBUTE_NAMES = {number: name for name, number in ATTRIBUTES.items()}


def install(seam: Seam) -> None:
    """Replace the functions of ``cuda.bindings.driver``."""
    from cuda.bindings import driver

    for name in dir(driver):
        if not name.startswith("cu") or isinstance(getattr(driver, name), type):
            continue
        setattr(driver, name, _function(seam, name) if name in SITES else seam.refuse(name))
    driver.cuGetErrorName = _error_name
    driver.cuGetErrorString = _error_name


def _function(seam: Seam, site: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not seam.machine.knows(site):
            raise seam.unknown(site)
        try:
            return seam.injector.call(
                site,
                lambda: seam.machine.call(site, *args, **kwargs),
                DRIVER,
                argument=_argument(site, args),
                refers=args,
                replace=_with_value,
            )
        except UnknownCall as error:
            raise seam.unknown(f"{site}: {error}") from None

    call.__name__ = site
    return call


def _argument(site: str, args: tuple[Any, ...]) -> str:
    """The attribute that is asked for, by name where it has one."""
    if site != "cuDeviceGetAttribute" or not args:
        return ""
    return _ATTRIBUTE_NAMES.get(int(args[0]), str(int(args[0])))


def _with_value(value: Any) -> Any:
    from cuda.bindings import driver

    return (driver.CUresult.CUDA_SUCCESS, value)


def _error_name(error: Any) -> Any:
    """``cuGetErrorName`` touches no device: it is answered here, as bytes."""
    from cuda.bindings import driver

    number = int(error)
    assert number in CUDA.values(), name_of(number)
    return (driver.CUresult.CUDA_SUCCESS, driver.CUresult(number).name.encode())
