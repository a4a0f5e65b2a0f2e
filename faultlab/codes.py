"""Error codes by name, for every library at the seam.

Names and numbers are those of ``cuda.h`` (CUresult), ``driver_types.h``
(cudaError_t) and ``nvml.h`` (nvmlReturn_t). A test compares them with the
installed bindings; they stand here so that checking a file needs no CUDA package.
"""

from __future__ import annotations

from typing import Final

CUDA: Final[dict[str, int]] = {
    "CUDA_SUCCESS": 0,
    "CUDA_ERROR_INVALID_VALUE": 1,
    "CUDA_ERROR_OUT_OF_MEMORY": 2,
    "CUDA_ERROR_NOT_INITIALIZED": 3,
    "CUDA_ERROR_DEINITIALIZED": 4,
    "CUDA_ERROR_NO_DEVICE": 100,
    "CUDA_ERROR_INVALID_DEVICE": 101,
    "CUDA_ERROR_INVALID_CONTEXT": 201,
    "CUDA_ERROR_MAP_FAILED": 205,
    "CUDA_ERROR_ECC_UNCORRECTABLE": 214,
    "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": 217,
    "CUDA_ERROR_NVLINK_UNCORRECTABLE": 220,
    "CUDA_ERROR_INVALID_HANDLE": 400,
    "CUDA_ERROR_ILLEGAL_STATE": 401,
    "CUDA_ERROR_NOT_READY": 600,
    "CUDA_ERROR_ILLEGAL_ADDRESS": 700,
    "CUDA_ERROR_LAUNCH_TIMEOUT": 702,
    "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED": 704,
    "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED": 705,
    "CUDA_ERROR_TOO_MANY_PEERS": 711,
    "CUDA_ERROR_MISALIGNED_ADDRESS": 716,
    "CUDA_ERROR_LAUNCH_FAILED": 719,
    "CUDA_ERROR_NOT_PERMITTED": 800,
    "CUDA_ERROR_NOT_SUPPORTED": 801,
    "CUDA_ERROR_SYSTEM_NOT_READY": 802,
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": 900,
    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": 901,
    "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT": 906,
    "CUDA_ERROR_UNKNOWN": 999,
}

#: Sticky: the context answers this error to every later call that reports
#: asynchronous errors (cuda.h, CUresult; recorded on an H200 for 700 and 716).
STICKY: Final[frozenset[str]] = frozenset(
    {
        "CUDA_ERROR_ECC_UNCORRECTABLE",
        "CUDA_ERROR_NVLINK_UNCORRECTABLE",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDA_ERROR_LAUNCH_TIMEOUT",
        "CUDA_ERROR_MISALIGNED_ADDRESS",
        "CUDA_ERROR_LAUNCH_FAILED",
    }
)

#: What ``cudaGetErrorString`` says (driver_types.h); used for the ctypes runtime.
ERROR_TEXT: Final[dict[int, str]] = {
    0: "no error",
    1: "invalid argument",
    2: "out of memory",
    3: "initialization error",
    4: "driver shutting down",
    100: "no CUDA-capable device is detected",
    101: "invalid device ordinal",
    201: "invalid device context",
    205: "mapping of buffer object failed",
    214: "uncorrectable ECC error encountered",
    217: "peer access is not supported between these two devices",
    220: "uncorrectable NVLink error detected during the execution",
    400: "invalid resource handle",
    401: "the operation cannot be performed in the present state",
    600: "device not ready",
    700: "an illegal memory access was encountered",
    702: "the launch timed out and was terminated",
    704: "peer access is already enabled",
    705: "peer access has not been enabled",
    711: "peer mapping resources exhausted",
    716: "misaligned address",
    719: "unspecified launch failure",
    800: "operation not permitted",
    801: "operation not supported",
    802: "system not yet initialized",
    900: "operation not permitted when stream is capturing",
    901: "operation failed due to a previous error during capture",
    906: "operation would make the legacy stream depend on a capturing blocking stream",
    999: "unknown error",
}

NVML: Final[dict[str, int]] = {
    "NVML_SUCCESS": 0,
    "NVML_ERROR_UNINITIALIZED": 1,
    "NVML_ERROR_INVALID_ARGUMENT": 2,
    "NVML_ERROR_NOT_SUPPORTED": 3,
    "NVML_ERROR_NO_PERMISSION": 4,
    "NVML_ERROR_NOT_FOUND": 6,
    "NVML_ERROR_DRIVER_NOT_LOADED": 9,
    "NVML_ERROR_LIBRARY_NOT_FOUND": 12,
    "NVML_ERROR_FUNCTION_NOT_FOUND": 13,
    "NVML_ERROR_GPU_IS_LOST": 15,
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": 18,
    "NVML_ERROR_ARGUMENT_VERSION_MISMATCH": 25,
    "NVML_ERROR_NOT_READY": 27,
    "NVML_ERROR_UNKNOWN": 999,
}

#: What an ``NVMLError`` says (nvmlErrorString), where it is not "NVML Error with code N".
NVML_TEXT: Final[dict[int, str]] = {
    1: "Uninitialized",
    2: "Invalid Argument",
    3: "Not Supported",
    4: "Insufficient Permissions",
    6: "Not Found",
    9: "Driver Not Loaded",
    12: "NVML Shared Library Not Found",
    13: "Function Not Found",
    15: "GPU is lost",
    18: "RM has detected an NVML/RM version mismatch.",
    999: "Unknown Error",
}


def name_of(number: int, table: dict[str, int] | None = None) -> str:
    """The name of an error number, or ``code-N`` when the table has none."""
    for name, value in (table or CUDA).items():
        if value == number:
            return name
    return f"code-{number}"
