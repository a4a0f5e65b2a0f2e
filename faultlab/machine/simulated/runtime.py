"""The CUDA runtime's calls on a simulated machine: the number of the error, then a value.

A runtime call makes the device's primary context current where the thread has
none (CUDA runtime API, "Interactions with the CUDA Driver API"); here that is the
rank's own device.
"""

# ruff: noqa: N802 - the names are the runtime's

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from faultlab.codes import CUDA
from faultlab.machine.simulated import memory

if TYPE_CHECKING:
    from faultlab.machine.simulated.machine import SimulatedMachine

CALLS: dict[str, Callable[..., Any]] = {}


def _call(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def with_context(machine: SimulatedMachine, *args: Any) -> Any:
        if machine.current_device is None:
            machine.current_device = machine.own_device
        return function(machine, *args)

    CALLS[f"cudart.{function.__name__}"] = with_context
    return with_context


def _answer(error: str) -> tuple[int, None]:
    return (CUDA[error] if error else 0, None)


@_call
def cudaSetDevice(machine: SimulatedMachine, device: int) -> Any:
    """The calling thread's device."""
    if not machine.has_device(device):
        return _answer("CUDA_ERROR_INVALID_DEVICE")
    machine.current_device = int(device)
    return _answer("")


@_call
def cudaDeviceSynchronize(machine: SimulatedMachine) -> Any:
    """Where the error of a failed kernel shows."""
    return _answer(machine.sticky or machine.unsafe_in_capture(waits=True))


@_call
def cudaMalloc(machine: SimulatedMachine, size: int) -> Any:
    """Private memory of the current device: its address."""
    error, address = memory.allocate(machine, int(size))
    return _answer(error) if error else (0, address)


@_call
def cudaFree(machine: SimulatedMachine, pointer: int) -> Any:
    """Gives back what cudaMalloc made."""
    return _answer(memory.free(machine, int(pointer)))


@_call
def cudaMemset(machine: SimulatedMachine, pointer: int, byte: int, count: int) -> Any:
    """``count`` bytes; works on mapped addresses as well (unified addressing)."""
    return _answer(memory.fill(machine, int(pointer), int(byte), int(count), 1))


@_call
def cudaMemcpy(machine: SimulatedMachine, to: int, source: int, count: int, kind: int) -> Any:
    """Whatever the ``kind``, the addresses tell which side is the device, as they do
    for ``cudaMemcpyDefault``, the only kind that FlashInfer uses."""
    return _answer(memory.copy(machine, int(to), int(source), int(count)))
