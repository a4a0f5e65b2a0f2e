"""The seam at the CUDA runtime: the ctypes library FlashInfer loads, the
``cuda.bindings.runtime`` module, and ``torch.cuda``.

FlashInfer looks for a mapped ``libcudart`` at the first use; a CPU process has
none, so the library object is put in place, and FlashInfer's own wrapper with
its own error texts runs over it.
"""

from __future__ import annotations

import ctypes
from typing import Any

from faultlab.seam.base import Seam
from faultlab.seam.conventions import RUNTIME, runtime_text


def install(seam: Seam) -> None:
    """Put the runtime in place everywhere it is reached from Python."""
    _install_bindings(seam)
    _install_ctypes(seam)
    _install_torch(seam)


def call(seam: Seam, name: str, *args: Any) -> tuple[int, Any]:
    """Make one runtime call: the error number and the value, if any."""
    site = f"cudart.{name}"
    result = seam.injector.call(site, lambda: seam.machine.call(site, *args), RUNTIME, refers=args)
    return int(result[0]), result[1] if len(result) > 1 else None


def synchronize(seam: Seam) -> None:
    """Wait for the device, as ``torch.cuda.synchronize`` does. Raises torch's error."""
    code, _ = call(seam, "cudaDeviceSynchronize")
    raise_if_failed(code)


def raise_if_failed(code: int) -> None:
    """Raise what torch raises for a runtime error: its own AcceleratorError, in its words
    (c10/cuda/CUDAException.cpp). 0 is no error."""
    import torch

    if code:
        error = torch.AcceleratorError(f"CUDA error: {runtime_text(code)}")
        error.error_code = code
        raise error


def _install_bindings(seam: Seam) -> None:
    from cuda.bindings import runtime

    def cuda_set_device(device: int) -> Any:
        code, _ = call(seam, "cudaSetDevice", device)
        return (runtime.cudaError_t(code),)

    for name in dir(runtime):
        if name.startswith("cuda") and not isinstance(getattr(runtime, name), type):
            setattr(runtime, name, seam.refuse(f"cuda.bindings.runtime.{name}"))
    runtime.cudaSetDevice = cuda_set_device


def _install_ctypes(seam: Seam) -> None:
    from flashinfer.comm import cuda_ipc

    class Library(cuda_ipc.CudaRTLibrary):  # type: ignore[misc]
        """FlashInfer's wrapper over functions that end at the machine."""

        def __init__(self) -> None:
            self.funcs = _ctypes_functions(seam)
            for function in cuda_ipc.CudaRTLibrary.exported_functions:
                self.funcs.setdefault(function.name, seam.refuse(f"cudart.{function.name}"))

    cuda_ipc.cudart._library = Library()


def _ctypes_functions(seam: Seam) -> dict[str, Any]:
    def malloc(reference: Any, size: int) -> int:
        code, pointer = call(seam, "cudaMalloc", int(size))
        if code == 0:
            reference._obj.value = int(pointer)
        return code

    return {
        "cudaSetDevice": lambda device: call(seam, "cudaSetDevice", int(device))[0],
        "cudaDeviceSynchronize": lambda: call(seam, "cudaDeviceSynchronize")[0],
        "cudaGetErrorString": lambda error: runtime_text(int(error)).encode(),
        "cudaMalloc": malloc,
        "cudaFree": lambda pointer: call(seam, "cudaFree", _address(pointer))[0],
        "cudaMemset": lambda pointer, byte, size: call(
            seam, "cudaMemset", _address(pointer), int(byte), int(size)
        )[0],
        "cudaMemcpy": lambda to, source, size, kind: call(
            seam, "cudaMemcpy", _address(to), _address(source), int(size), int(kind)
        )[0],
    }


def _address(pointer: Any) -> int:
    """The number in a ctypes pointer, a plain int or None."""
    if pointer is None:
        return 0
    if isinstance(pointer, int):
        return pointer
    value = ctypes.cast(pointer, ctypes.c_void_p).value
    return 0 if value is None else int(value)


def _install_torch(seam: Seam) -> None:
    """The parts of ``torch.cuda`` that set-up code asks; the rest is an unknown call."""
    import torch

    current: dict[str, int] = {}

    def node_gpus() -> int:
        return seam.scenario.topology.gpus.count

    def capability(device: Any = None) -> tuple[int, int]:
        major, minor = seam.scenario.topology.gpus.compute_capability.split(".")
        return int(major), int(minor)

    def capturing() -> bool:
        return seam.machine.capturing()

    def set_device(device: Any) -> None:
        index = torch.device("cuda", device).index if isinstance(device, int) else torch.device(device).index
        code, _ = call(seam, "cudaSetDevice", index)
        raise_if_failed(code)
        current["device"] = index

    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": node_gpus,
        "current_device": lambda: current.get("device", seam.rank % node_gpus()),
        "get_device_capability": capability,
        "get_device_name": lambda device=None: seam.scenario.topology.gpus.model,
        "set_device": set_device,
        "synchronize": lambda device=None: synchronize(seam),
        "is_current_stream_capturing": capturing,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    # Where torch.cuda has it from: asked by that name as well.
    torch.cuda.graphs.is_current_stream_capturing = capturing
    torch.cuda._lazy_init = seam.refuse("torch.cuda._lazy_init")


def device_mode() -> Any:
    """A torch function mode under which ``device="cuda"`` makes CPU tensors."""
    import torch
    from torch.overrides import TorchFunctionMode

    tensor_to, tensor_cuda = torch.Tensor.to, torch.Tensor.cuda

    class CudaOnCpu(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is tensor_to:
                args = tuple("cpu" if _is_cuda(each) else each for each in args)
            elif function is tensor_cuda:
                return args[0]
            if not kwargs:
                return function(*args)
            if _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": "cpu"}
            return function(*args, **kwargs)

    return CudaOnCpu()


def _is_cuda(device: Any) -> bool:
    import torch

    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    return isinstance(device, torch.device) and device.type == "cuda"
