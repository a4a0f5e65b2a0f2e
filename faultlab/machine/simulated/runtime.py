"""The CUDA runtime's calls on a simulated machine: the number of the error, then values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from faultlab.codes import CUDA
from faultlab.machine.simulated import memory

if TYPE_CHECKING:
    from faultlab.machine.simulated.machine import SimulatedMachine

CALLS: dict[str, Callable[..., Any]] = {}


def _call(function: Callable[..., Any]) -> Callable[..., Any]:
    CALLS[f"cudart.{function.__name__}"] = function
    return function


@_call
def cudaSetDevice(machine: SimulatedMachine, device: int) -> Any:  # noqa: N802
    if not 0 <= int(device) < machine.topology.gpus.count:
        return (CUDA["CUDA_ERROR_INVALID_DEVICE"], None)
    machine.device = machine.context_device = int(device)
    return (0, None)


@_call
def cudaDeviceSynchronize(machine: SimulatedMachine) -> Any:  # noqa: N802
    error = machine.sticky or machine.unsafe_in_capture(allocates=False)
    return (CUDA[error] if error else 0, None)


@_call
def cudaMalloc(machine: SimulatedMachine, size: int) -> Any:  # noqa: N802
    error, address = memory.allocate(machine, int(size))
    return (CUDA[error], None) if error else (0, address)


@_call
def cudaFree(machine: SimulatedMachine, pointer: int) -> Any:  # noqa: N802
    error = memory.free(machine, int(pointer))
    return (CUDA[error] if error else 0, None)


@_call
def cudaMemset(machine: SimulatedMachine, pointer: int, byte: int, count: int) -> Any:  # noqa: N802
    error = memory.fill(machine, int(pointer), int(byte), int(count), 1)
    return (CUDA[error] if error else 0, None)


@_call
def cudaMemcpy(machine: SimulatedMachine, to: int, source: int, count: int, kind: int) -> Any:  # noqa: N802
    """``cudaMemcpyDefault``: which side is the device is told by the address."""
    if machine.sticky:
        return (CUDA[machine.sticky], None)
    data = (
        machine.view(int(source), int(count))
        if _on_device(source)
        else memory.host_bytes(int(source), int(count))
    )
    target = machine.view(int(to), int(count)) if _on_device(to) else memory.host_view(int(to), int(count))
    if data is None or target is None:
        return (CUDA["CUDA_ERROR_INVALID_VALUE"], None)
    memoryview(target).cast("B")[:] = bytes(data)
    return (0, None)


def _on_device(address: int) -> bool:
    from faultlab.machine.simulated.addresses import BASE

    # A null pointer is no host memory either.
    return int(address) >= BASE or int(address) < 4096
