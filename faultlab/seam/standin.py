"""Mocked creation: a stand-in for FlashInfer's function, with its own signature.

The stand-in returns instances of FlashInfer's own workspace classes whose
memory is one region that all ranks share, made without a single driver call of
FlashInfer's. It tests the consumer alone: what it returns, raises or leaves
undone is the scenario's word, at ``workspace.create``, ``workspace.mc_ptr`` and
``workspace.destroy``. ``create_autospec`` keeps its signature honest.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from faultlab.seam.base import Seam

#: Room for every rank's slot in each of the three rotating buffers.
_BUFFERS = 3


def make_create(seam: Seam) -> Any:
    """The stand-in for ``create_allreduce_fusion_workspace`` of this rank."""
    from flashinfer.comm import allreduce

    standin = mock.create_autospec(allreduce.create_allreduce_fusion_workspace)

    def create(backend: str = "auto", **arguments: Any) -> Any:
        key = f"{backend}-{seam.creations[backend]}"
        return _build(seam, _resolve(seam, backend), key, arguments)

    standin.side_effect = create
    return standin


def _resolve(seam: Seam, backend: str) -> str:
    """FlashInfer's automatic choice (allreduce.py): mnnvl where every rank has
    multicast, else trtllm; an explicit choice as it is."""
    from flashinfer.comm.mnnvl import is_multicast_supported

    if backend != "auto":
        return backend
    return "mnnvl" if is_multicast_supported(seam.rank % seam.scenario.topology.gpus.count) else "trtllm"


def _build(seam: Seam, backend: str, key: str, arguments: dict[str, Any]) -> Any:
    with seam.context.in_window(backend):
        world_size = int(arguments["world_size"])
        rank_bytes = (
            int(arguments["max_token_num"]) * int(arguments["hidden_dim"]) * arguments["dtype"].itemsize
        )
        size_bytes = _BUFFERS * world_size * world_size * rank_bytes
        address = seam.machine.make_standin(key, world_size, size_bytes)  # type: ignore[attr-defined]
        kind = _mnnvl_class(seam) if backend == "mnnvl" else _trtllm_class(seam)
        return kind(address, **arguments)


def _mnnvl_class(seam: Seam) -> Any:
    from flashinfer.comm.trtllm_mnnvl_ar import MNNVLAllReduceFusionWorkspace
    from flashinfer.comm.workspace_base import AllReduceFusionWorkspace

    class StandIn(MNNVLAllReduceFusionWorkspace):  # type: ignore[misc]
        """An MNNVL workspace over shared stand-in memory."""

        def __init__(self, address: int, **arguments: Any) -> None:
            import torch

            AllReduceFusionWorkspace.__init__(self, arguments["world_size"], arguments["rank"])
            self.tp_size = arguments["world_size"]
            self.handle = None
            self.mc_ptr = address
            self.uc_ptr_local = address
            self.uc_ptrs_dev = address
            self.buffer_size_bytes = 1 << 40
            self.buffer_flags = torch.zeros(9, dtype=torch.int64).to(torch.uint32)
            self._address = address

        def _destroy_standin(self) -> None:
            _release_once(seam, self)

    return _with_destroy(seam, StandIn, "mnnvl")


def _trtllm_class(seam: Seam) -> Any:
    from flashinfer.comm.allreduce import TRTLLMAllReduceFusionWorkspace
    from flashinfer.comm.workspace_base import AllReduceFusionWorkspace

    class StandIn(TRTLLMAllReduceFusionWorkspace):  # type: ignore[misc]
        """A trtllm workspace over shared stand-in memory."""

        def __init__(self, address: int, **arguments: Any) -> None:
            import torch

            world_size = arguments["world_size"]
            AllReduceFusionWorkspace.__init__(self, world_size, arguments["rank"])
            pointers = [address] * (3 * world_size + 1)
            self.ipc_handles = [[address] * world_size for _ in range(3)]
            self.workspace_tensor = torch.tensor(pointers, dtype=torch.int64)
            self.mem_handles: list[Any] = []
            self.metadata = {
                "tp_rank": arguments["rank"],
                "tp_size": world_size,
                "max_token_num": arguments["max_token_num"],
                "hidden_dim": arguments["hidden_dim"],
                "use_fp32_lamport": arguments["dtype"] == torch.float32,
                "control_flag_ptr": 0,
            }
            self._internal_workspace = (
                self.ipc_handles,
                self.workspace_tensor,
                self.mem_handles,
                self.metadata,
            )
            self._address = address

        def _destroy_standin(self) -> None:
            _release_once(seam, self)

    return _with_destroy(seam, StandIn, "trtllm")


def _release_once(seam: Seam, workspace: Any) -> None:
    if not workspace._destroyed:
        seam.machine.release_standin(workspace._address)  # type: ignore[attr-defined]
        workspace._destroyed = True


def _with_destroy(seam: Seam, kind: Any, window: str) -> Any:
    """The class with its own destruction, reported as FlashInfer's is."""
    from faultlab.seam.workspace import report_destroy

    kind.destroy = lambda self: self._destroy_standin()
    report_destroy(seam, kind, window)
    return kind
