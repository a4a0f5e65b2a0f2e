"""The subject ``flashinfer``: FlashInfer's workspace interface and nothing around it."""

from __future__ import annotations

from typing import Any

import torch

from faultlab.subjects.base import Environment


class FlashInfer:
    """Creates with FlashInfer's own function, uses and destroys what it returns.

    It checks nothing and falls back to nothing: its results say what a consumer
    has to handle. The errors FlashInfer documents are ValueError and RuntimeError.
    """

    declared_errors: tuple[type[BaseException], ...] = (ValueError, RuntimeError)
    logs = False
    ladder: tuple[str, ...] = ()

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._workspace: Any = None
        self._destroyed = False

    def create(self) -> Any:
        """Create once; an existing workspace is used again, as consumers do."""
        import flashinfer.comm

        if self._workspace is None or self._destroyed:
            environment = self._environment
            backend = environment.backend
            if backend == "auto" and environment.preferred is not None:
                backend = environment.preferred
            self._workspace = flashinfer.comm.create_allreduce_fusion_workspace(
                backend=backend,
                world_size=environment.world_size,
                rank=environment.rank,
                max_token_num=environment.max_token_num,
                hidden_dim=environment.hidden_dim,
                dtype=environment.dtype,
                comm_backend=flashinfer.comm.mnnvl.TorchDistBackend(environment.group),
                group=environment.group,
            )
            self._destroyed = False
        return self._workspace

    def use(self, tensor: torch.Tensor) -> torch.Tensor:
        """FlashInfer's all-reduce through the workspace."""
        import flashinfer.comm

        if self._workspace is None:
            raise RuntimeError("there is no workspace to use")
        return flashinfer.comm.allreduce_fusion(
            input=tensor,
            workspace=self._workspace,
            pattern=flashinfer.comm.AllReduceFusionPattern.kAllReduce,
            launch_with_pdl=False,
        )

    def collective(self) -> None:
        """One barrier on the group."""
        torch.distributed.barrier(group=self._environment.group)

    def destroy(self) -> None:
        """FlashInfer's ``destroy``; the object is kept, so that it can be called twice."""
        if self._workspace is not None:
            self._destroyed = True
            self._workspace.destroy()

    def exit(self) -> None:
        """Drop the object, as the end of the interpreter does."""
        self._workspace = None
