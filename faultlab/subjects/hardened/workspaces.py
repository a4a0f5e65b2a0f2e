"""The two workspaces: the memory laid out as FlashInfer's kernels read it, and their launches.

Sizes and layouts are those of FlashInfer 0.7.4 (``trtllm_mnnvl_ar.py``,
``trtllm_ar.py`` and the two kernels' headers), and so are the arguments of the
launches. A workspace exists only once every rank has voted that its own is ready.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from faultlab.subjects.base import Environment
from faultlab.subjects.hardened.memory import SharedMemory, create_team, share_memory
from faultlab.subjects.hardened.steps import Setup, driver, runtime

#: For how many ranks the kernels are built (their headers' ``switch`` over the number of ranks).
_MNNVL_RANKS: Final = (2, 4, 8, 16, 32, 64)
_TRTLLM_RANKS: Final = (2, 4, 8, 16)
#: For how many FlashInfer itself knows when one-shot is faster (``_use_oneshot_heuristics``).
_TRTLLM_MEASURED: Final = (2, 4, 8)

_BUFFERS: Final = 3
#: Two stages of vectors of 16 bytes.
_MNNVL_ALIGNMENT: Final = 32
_MNNVL_LARGEST: Final = 2**32 - 1
#: Negative zero in float32, and in two bfloat16 or float16 as their second: "not written yet".
_NOT_WRITTEN: Final = 0x80000000

_FLAGS_PER_RANK: Final = 256
_FLAG_BYTES: Final = 4
#: The largest signed 32-bit number, in whole 2 MiB: what the one-shot kernel can count.
_TRTLLM_LARGEST: Final = (2**31 - 1) // (1 << 21) * (1 << 21)
_PART_ALIGNMENT: Final = 256
#: Counter, two-shot flag, one-shot flag, bytes of one lamport buffer, bytes to clear.
_CONTROL_WORDS: Final = 5
_CONTROL_SIZE_WORD: Final = 3


class InputTooLarge(ValueError):
    """The input needs more room than the workspace was made for."""


class Workspace(Protocol):
    """What ``create`` returns: which back end it is, and its all-reduce."""

    @property
    def backend(self) -> str: ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor: ...


def set_up(setup: Setup, backend: str) -> Workspace:
    """Set one back end up on all ranks. Raises StepFailed on all or none, or GroupFailed;
    what was taken is in ``setup.undo`` either way."""
    return {"mnnvl": _set_up_mnnvl, "trtllm": _set_up_trtllm}[backend](setup)


# --------------------------------------------------------------------- mnnvl


@dataclass(frozen=True)
class Mnnvl:
    """One shared buffer per rank and a multicast object over all of them.

    ``table``: the device address of all ranks' buffers' addresses. ``flags``: which of the three
    buffers is next, how many bytes each has, and what is to be cleared.
    """

    environment: Environment
    multicast: int
    own: int
    table: int
    flags: torch.Tensor
    buffer_bytes: int
    module: Any
    backend: str = "mnnvl"

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, ``[tokens, hidden_dim]``. Raises InputTooLarge."""
        from flashinfer.comm.trtllm_mnnvl_ar import MNNVLAllreduceFusionStrategy as Strategy

        world, (tokens, hidden_dim) = self.environment.world_size, tensor.shape
        strategy = Strategy.select_strategy(world, tokens, hidden_dim, tensor.dtype)
        needed = _mnnvl_needs(world, tokens, hidden_dim, tensor.dtype, strategy)
        if needed > self.buffer_bytes:
            raise InputTooLarge(f"the input needs {needed} bytes of {self.buffer_bytes}")
        output = torch.empty_like(tensor)
        self.module.trtllm_mnnvl_allreduce_fusion(
            tensor,
            self.multicast,
            self.table,
            self.own,
            self.flags,
            world,
            self.environment.rank,
            False,  # no RMS norm
            False,  # no programmatic dependent launch
            strategy == Strategy.ONESHOT,
            output,
            None,
            None,
            None,
            None,
        )
        return output


def _set_up_mnnvl(setup: Setup) -> Workspace:
    environment = setup.environment
    wanted = setup.together("ask whether multicast is there", lambda: _mnnvl_buffer_bytes(setup))
    module = setup.together("load the mnnvl kernels", _load_mnnvl)
    memory = share_memory(setup, _BUFFERS * wanted, multicast=True)
    multicast = create_team(setup, memory)
    buffer_bytes = memory.size_bytes // _BUFFERS // _MNNVL_ALIGNMENT * _MNNVL_ALIGNMENT
    table, flags = setup.together("fill the buffers", lambda: _fill_mnnvl(setup, memory, buffer_bytes))
    own = memory.addresses[setup.rank]
    return Mnnvl(environment, multicast, own, table, flags, buffer_bytes, module)


def _mnnvl_buffer_bytes(setup: Setup) -> int:
    """The size of one buffer, as FlashInfer reckons it. Raises RuntimeError where the back end cannot be."""
    from cuda.bindings import driver as cuda
    from flashinfer.comm.trtllm_mnnvl_ar import MNNVL_ONE_SHOT_THRESHOLD
    from flashinfer.comm.trtllm_mnnvl_ar import MNNVLAllreduceFusionStrategy as Strategy
    from flashinfer.utils import is_confidential_compute

    _check_ranks(setup, _MNNVL_RANKS)
    if is_confidential_compute():
        raise RuntimeError("multicast is not available under confidential computing")
    attribute = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
    if not driver("cuDeviceGetAttribute", attribute, setup.device):
        raise RuntimeError("the device says that it does not support multicast")
    asked = setup.environment
    world, hidden, dtype = asked.world_size, asked.hidden_dim, asked.dtype
    few = min(MNNVL_ONE_SHOT_THRESHOLD // (world * dtype.itemsize * hidden), asked.max_token_num)
    needed = max(
        _mnnvl_needs(world, few, hidden, dtype, Strategy.ONESHOT),
        _mnnvl_needs(world, asked.max_token_num, hidden, dtype, Strategy.TWOSHOT),
    )
    needed = _round_up(needed, _MNNVL_ALIGNMENT)
    if needed > _MNNVL_LARGEST:
        raise RuntimeError(f"a buffer of {needed} bytes is larger than the kernels can count")
    return needed


def _mnnvl_needs(world: int, tokens: int, hidden_dim: int, dtype: torch.dtype, strategy: Any) -> int:
    from flashinfer.comm.trtllm_mnnvl_ar import MNNVLAllReduceFusionWorkspace

    needed = MNNVLAllReduceFusionWorkspace.get_required_buffer_size_bytes
    return int(needed(world, tokens, hidden_dim, dtype, strategy))


def _load_mnnvl() -> Any:
    from flashinfer.comm.trtllm_mnnvl_ar import get_trtllm_mnnvl_comm_module

    return get_trtllm_mnnvl_comm_module()


def _fill_mnnvl(setup: Setup, memory: SharedMemory, buffer_bytes: int) -> tuple[int, torch.Tensor]:
    """Mark the own buffers as not written, and make what tells the kernels where they are."""
    own = memory.addresses[setup.rank]
    driver("cuMemsetD32", own, _NOT_WRITTEN, memory.size_bytes // 4)
    addresses = (ctypes.c_uint64 * setup.world_size)(*memory.addresses)
    table = int(driver("cuMemAlloc", ctypes.sizeof(addresses)))
    setup.undo.add(driver, "cuMemFree", table)
    driver("cuMemcpyHtoD", table, ctypes.addressof(addresses), ctypes.sizeof(addresses))
    # Next buffer, last used buffer, bytes of a buffer, its stages, four counts to clear, accesses.
    words = [0, 2, buffer_bytes, 0, 0, 0, 0, 0, 0]
    flags = torch.tensor(words, dtype=torch.uint32, device=setup.environment.device)
    torch.cuda.synchronize()
    return table, flags


# -------------------------------------------------------------------- trtllm


@dataclass(frozen=True)
class Trtllm:
    """One shared memory per rank with three parts, and a private control block.

    ``pointers``: every rank's buffer, flags and lamport buffers, then the control block, on the device.
    """

    environment: Environment
    pointers: torch.Tensor
    backend: str = "trtllm"

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, ``[tokens, hidden_dim]``. Raises InputTooLarge."""
        from flashinfer.comm.trtllm_ar import AllReduceFusionPattern, trtllm_allreduce_fusion

        asked = self.environment
        tokens, hidden_dim = tensor.shape
        room = asked.max_token_num * asked.hidden_dim
        if tensor.numel() > room or tensor.dtype.itemsize > asked.dtype.itemsize:
            raise InputTooLarge(f"the input has {tensor.numel()} elements, the workspace room for {room}")
        output = torch.empty_like(tensor)
        trtllm_allreduce_fusion(
            allreduce_in=tensor,
            world_size=asked.world_size,
            world_rank=asked.rank,
            token_num=tokens,
            hidden_dim=hidden_dim,
            workspace_ptrs=self.pointers,
            launch_with_pdl=False,
            trigger_completion_at_end=True,
            fp32_acc=False,
            pattern_code=AllReduceFusionPattern.kAllReduce,
            # Two-shot needs more tokens than ranks; where nobody measured, one-shot is for the others.
            use_oneshot=None if asked.world_size in _TRTLLM_MEASURED else tokens <= asked.world_size,
            allreduce_out=output,
            residual_in=None,
            residual_out=None,
            norm_out=None,
            quant_out=None,
            scale_out=None,
            rms_gamma=None,
            rms_eps=None,
            scale_factor=None,
            layout_code=None,
        )
        return output


@dataclass(frozen=True)
class TrtllmParts:
    """The parts of a rank's memory, in bytes. ``message``: one of the three lamport buffers."""

    buffer: int
    flags: int
    message: int

    @property
    def offsets(self) -> tuple[int, int, int]:
        """Where buffer, flags and lamport buffers begin."""
        flags = _round_up(self.buffer, _PART_ALIGNMENT)
        return 0, flags, flags + _round_up(self.flags, _PART_ALIGNMENT)

    @property
    def lamport(self) -> int:
        """All three lamport buffers, in bytes; a multiple of 16."""
        return _round_up(_BUFFERS * self.message, 16)

    @property
    def total(self) -> int:
        """What one rank shares, in bytes."""
        return self.offsets[2] + self.lamport


def trtllm_parts(world_size: int, max_token_num: int, hidden_dim: int, dtype: torch.dtype) -> TrtllmParts:
    """The sizes as ``trtllm_create_ipc_workspace_for_all_reduce_fusion`` reckons them."""
    whole = world_size * max_token_num * hidden_dim * (4 if dtype == torch.float32 else 2)
    return TrtllmParts(whole, world_size * _FLAGS_PER_RANK * _FLAG_BYTES, min(whole, _TRTLLM_LARGEST))


def _set_up_trtllm(setup: Setup) -> Workspace:
    asked = setup.environment
    setup.together("check the number of ranks", lambda: _check_ranks(setup, _TRTLLM_RANKS))
    initialize = setup.together("load the trtllm kernels", _load_trtllm)
    parts = trtllm_parts(asked.world_size, asked.max_token_num, asked.hidden_dim, asked.dtype)
    memory = share_memory(setup, parts.total, multicast=False)
    control = setup.together("allocate the control block", lambda: _control_block(setup, parts))
    pointers = setup.together("fill the buffers", lambda: _fill(setup, memory, parts, control, initialize))
    return Trtllm(asked, pointers)


def _load_trtllm() -> Callable[[int, int, torch.dtype], None]:
    """Load the kernels: the one that fills a lamport buffer with "not written yet"."""
    from flashinfer.comm.trtllm_ar import get_trtllm_comm_module, trtllm_lamport_initialize

    get_trtllm_comm_module()
    initialize: Callable[[int, int, torch.dtype], None] = trtllm_lamport_initialize
    return initialize


def _control_block(setup: Setup, parts: TrtllmParts) -> int:
    """The words that the kernels count in, all zero but the size of one lamport buffer."""
    size = _CONTROL_WORDS * _FLAG_BYTES
    block = runtime("cudaMalloc", size)
    setup.undo.add(runtime, "cudaFree", block)
    address = int(block.value)
    runtime("cudaMemset", ctypes.c_void_p(address), 0, size)
    message = ctypes.c_uint32(parts.message)
    where = ctypes.c_void_p(address + _CONTROL_SIZE_WORD * _FLAG_BYTES)
    runtime("cudaMemcpy", where, ctypes.c_void_p(ctypes.addressof(message)), _FLAG_BYTES)
    return address


def _fill(
    setup: Setup,
    memory: SharedMemory,
    parts: TrtllmParts,
    control: int,
    initialize: Callable[[int, int, torch.dtype], None],
) -> torch.Tensor:
    """Clear the own flags, mark the own lamport buffers as not written, and make the table of pointers."""
    _, flags, lamport = (memory.addresses[setup.rank] + offset for offset in parts.offsets)
    runtime("cudaMemset", ctypes.c_void_p(flags), 0, parts.flags)
    dtype = torch.float32 if setup.environment.dtype == torch.float32 else torch.float16
    initialize(lamport, parts.lamport // dtype.itemsize, dtype)
    pointers = [address + offset for offset in parts.offsets for address in memory.addresses]
    table = torch.tensor([*pointers, control], dtype=torch.int64, device=setup.environment.device)
    torch.cuda.synchronize()
    return table


def _check_ranks(setup: Setup, served: tuple[int, ...]) -> None:
    if setup.world_size not in served:
        known = ", ".join(str(ranks) for ranks in served)
        raise RuntimeError(f"the kernels serve {known} ranks, not {setup.world_size}")


def _round_up(size_bytes: int, alignment: int) -> int:
    return -(-size_bytes // alignment) * alignment
