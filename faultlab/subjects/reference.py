"""The subject ``reference``: a consumer of FlashInfer that falls back together.

FlashInfer's creation is one long collective sequence, and a rank that fails
inside it leaves its peers waiting. A consumer cannot step into that sequence;
what it can do is find out beforehand, together, whether it will work:

1.  **Preflight**: every step that multicast set-up will take, on a small object
    of its own, with a vote of all ranks before each that waits for peers. A rank that fails says so
    at the next vote, nobody goes on, and everything is given back.
2.  **Votes before and after creation**: all ranks start it, and all ranks keep
    the result or none does. A workspace that is not usable on every rank is
    destroyed on every rank before the next rung is tried.
3.  **Ladder**: mnnvl, trtllm, then the process group's own all-reduce. An order of
    the user is used or refused with ``WorkspaceUnavailable``, the same on every rank.
4.  **Memory**: a rung that failed is not tried again by this object.
5.  **Capture**: while a stream captures, nothing is set up. A workspace that exists is
    used; without one, the plain all-reduce is captured, an order of the user is refused,
    and neither is remembered: ``create`` after the capture tries. Nobody votes on that:
    all ranks enter a capture alike, and a vote inside one would itself be set-up.

Each rung that is not used is one message, the same on every rank, which names the
call that failed, its error and the rank; a WARNING while a rung is left, an ERROR
where none is. It restores what a caller owns (Python's random state, the current device) and
releases by public means what FlashInfer's trtllm ``destroy()`` leaves behind.
To use it in your own code, copy this file and ``preflight.py``: they need torch, FlashInfer and
``cuda.bindings``, and nothing of the lab but ``Environment``.
"""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from faultlab.subjects.base import Environment, plain_all_reduce
from faultlab.subjects.preflight import StepFailed, preflight, vote

logger = logging.getLogger("faultlab.reference")

_LADDER = ("mnnvl", "trtllm")


class WorkspaceUnavailable(RuntimeError):
    """The back end that the user ordered cannot be used, on any rank."""


class Reference:
    """One method a step; see the module for the protocol."""

    declared_errors: tuple[type[BaseException], ...] = (WorkspaceUnavailable,)
    logs = True
    ladder = _LADDER

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._ladder = _ladder(environment)
        self._failed: dict[str, str] = {}
        self._workspace: Any = None
        self._said_captured = False

    # ----------------------------------------------------------------- steps

    def create(self) -> Any:
        """The best workspace that works on every rank, or None for the plain
        all-reduce. Raises WorkspaceUnavailable if the user's order cannot be met,
        and while a stream captures, if there is no workspace yet."""
        if self._workspace is not None:
            return self._workspace
        if self.capturing():
            return self._none_while_capturing()
        state, device = random.getstate(), torch.cuda.current_device()
        try:
            for backend in self._ladder:
                if backend not in self._failed and self._try(backend):
                    return self._workspace
        finally:
            random.setstate(state)
            if torch.cuda.current_device() != device:
                torch.cuda.set_device(device)
        if self._environment.backend != "auto":
            reason = self._failed.get(self._environment.backend, "it failed")
            raise WorkspaceUnavailable(
                f"{self._environment.backend} was ordered and cannot be used: {reason}"
            )
        return None

    def use(self, tensor: torch.Tensor) -> torch.Tensor:
        """The all-reduce, by whatever rung the ranks agreed on."""
        if self._workspace is None:
            return plain_all_reduce(tensor, self._environment.group)
        import flashinfer.comm

        return flashinfer.comm.allreduce_fusion(
            input=tensor,
            workspace=self._workspace,
            pattern=flashinfer.comm.AllReduceFusionPattern.kAllReduce,
            launch_with_pdl=False,
        )

    def collective(self) -> None:
        """One barrier on the group."""
        dist.barrier(group=self._environment.group)

    def destroy(self) -> None:
        """Give everything back; calling it again does nothing."""
        workspace, self._workspace = self._workspace, None
        if workspace is not None:
            self._destroy(workspace)

    def exit(self) -> None:
        """What is left when the interpreter ends is given back then."""
        self.destroy()

    # ---------------------------------------------------------------- a rung

    def _try(self, backend: str) -> bool:
        """Preflight, create and check one rung; all ranks return the same."""
        workspace = None
        try:
            with self._environment.window("preflight"):
                self.preflight(backend)
            workspace = self._voted("creation", lambda: self._create(backend))
        except StepFailed as failure:
            self._failed[backend] = str(failure)
            level = logging.WARNING if backend != self._ladder[-1] else logging.ERROR
            logger.log(level, "rank %d: %s is not used: %s", self._environment.rank, backend, failure)
            return False
        self._workspace = workspace
        return True

    def capturing(self) -> bool:
        """Whether the current stream captures, and nothing may be set up."""
        return bool(torch.cuda.is_current_stream_capturing())

    def _none_while_capturing(self) -> None:
        """No workspace for now; said once, and not remembered as a failure."""
        ordered = self._environment.backend
        if ordered != "auto":
            raise WorkspaceUnavailable(f"{ordered} was ordered and cannot be set up while a stream captures")
        if not self._said_captured:
            self._said_captured = True
            logger.warning(
                "rank %d: no workspace is set up while a stream captures; the plain all-reduce is captured",
                self._environment.rank,
            )

    def preflight(self, backend: str) -> None:
        """Whether every rank can take every step of this set-up. Raises StepFailed on all or none."""
        preflight(self._environment, backend)

    def why_unusable(self, workspace: Any) -> str:
        """Empty if the object can be given to a kernel on this rank, else the reason."""
        if workspace is None:
            return "creation returned nothing"
        if workspace.backend == "mnnvl" and not int(workspace.mc_ptr or 0):
            return "creation returned a workspace whose multicast pointer is null"
        return ""

    def _create(self, backend: str) -> Any:
        import flashinfer.comm
        from flashinfer.comm.mnnvl import TorchDistBackend

        environment = self._environment
        return flashinfer.comm.create_allreduce_fusion_workspace(
            backend=backend,
            world_size=environment.world_size,
            rank=environment.rank,
            max_token_num=environment.max_token_num,
            hidden_dim=environment.hidden_dim,
            dtype=environment.dtype,
            comm_backend=TorchDistBackend(environment.group),
            group=environment.group,
        )

    def _voted(self, name: str, make: Callable[[], Any]) -> Any:
        """Create, check and vote; a workspace that not all ranks can use is
        destroyed on every rank that has one."""
        workspace, problem = None, ""
        try:
            workspace = make()
            problem = self.why_unusable(workspace)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        try:
            vote(self._environment, name, problem)
        except StepFailed:
            if workspace is not None:
                self._destroy(workspace)
            raise
        return workspace

    def _destroy(self, workspace: Any) -> None:
        """Destroy once; what the destruction leaves behind is released after it."""
        leftovers = leftovers_of(workspace)
        try:
            workspace.destroy()
        except Exception as error:
            logger.warning(
                "rank %d: destroying the %s workspace failed and was contained: %s",
                self._environment.rank,
                getattr(workspace, "backend", "?"),
                error,
            )
        del workspace
        for release in leftovers:
            try:
                release()
            except Exception as error:
                logger.warning("rank %d: releasing a leftover failed: %s", self._environment.rank, error)
        leftovers.clear()
        gc.collect()


def _ladder(environment: Environment) -> tuple[str, ...]:
    """The rungs to try, best first."""
    if environment.backend != "auto":
        return (environment.backend,)
    start = _LADDER.index(environment.preferred) if environment.preferred else 0
    return _LADDER[start:]


def leftovers_of(workspace: Any) -> list[Callable[[], None]]:
    """What to release after ``destroy()`` of this workspace, by public means.

    FlashInfer's trtllm ``destroy()`` deletes attributes, while a module-global
    dictionary keeps the memory and nobody frees the flag (0.6.10 to 0.7.4).
    """
    if getattr(workspace, "backend", "") != "trtllm":
        return []
    handles = getattr(workspace, "ipc_handles", None)
    flag = (getattr(workspace, "metadata", None) or {}).get("control_flag_ptr", 0)
    releases: list[Callable[[], None]] = []
    if handles is not None:
        from flashinfer.comm import trtllm_destroy_ipc_workspace_for_all_reduce_fusion

        releases.append(lambda: trtllm_destroy_ipc_workspace_for_all_reduce_fusion(handles))
    if flag:
        import ctypes

        from flashinfer.comm.cuda_ipc import cudart

        releases.append(lambda: cudart.cudaFree(ctypes.c_void_p(flag)))
    return releases
