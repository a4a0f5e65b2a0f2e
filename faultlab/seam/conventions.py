"""How each library at the seam reports an error: by returning or by raising it."""

from __future__ import annotations

from typing import Any

from faultlab.codes import CUDA, ERROR_TEXT, NVML, name_of
from faultlab.sites import SITES


class Driver:
    """``cuda.bindings.driver``: a tuple that begins with a CUresult."""

    def fail(self, site: str, code: str) -> Any:
        from cuda.bindings import driver

        return (driver.CUresult(CUDA[code]), *[None] * SITES[site].outputs)

    def result_name(self, result: Any) -> str:
        number = int(result[0])
        return "ok" if number == 0 else name_of(number)


class Runtime:
    """The CUDA runtime: a number first, whatever the binding makes of it."""

    def fail(self, site: str, code: str) -> Any:
        return (CUDA[code], None)

    def result_name(self, result: Any) -> str:
        return "ok" if int(result[0]) == 0 else name_of(int(result[0]))


class Raising:
    """torch.distributed, the descriptor exchange, a value that is read: an exception of its own."""

    def fail(self, site: str, code: str) -> Any:
        raise RuntimeError(f"{site}: {code}")

    def result_name(self, result: Any) -> str:
        return "ok"


class Nvml(Raising):
    """NVML: raises ``NVMLError``."""

    def fail(self, site: str, code: str) -> Any:
        import pynvml

        raise pynvml.NVMLError(NVML[code])


class FlashInferStep(Raising):
    """A whole step: FlashInfer's ``checkCudaErrors`` text (flashinfer/cuda_utils.py)."""

    def fail(self, site: str, code: str) -> Any:
        raise RuntimeError(f"CUDA error code={CUDA[code]}({code.encode()!r})")


def runtime_text(number: int) -> str:
    """What ``cudaGetErrorString`` says."""
    return ERROR_TEXT.get(number, "unrecognized error code")


DRIVER = Driver()
RUNTIME = Runtime()
NVML_CONVENTION = Nvml()
RAISING = Raising()
STEP = FlashInferStep()
