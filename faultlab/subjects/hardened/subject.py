"""The consumer: the ladder of ``reference`` over the lab's own set-up. The package tells the protocol."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from faultlab.subjects.base import Environment, plain_all_reduce
from faultlab.subjects.hardened.steps import GroupFailed, Setup, Undo, words
from faultlab.subjects.hardened.workspaces import InputTooLarge, Workspace, set_up
from faultlab.subjects.preflight import StepFailed
from faultlab.subjects.reference import Reference, WorkspaceUnavailable

logger = logging.getLogger("faultlab.hardened")

T = TypeVar("T")


class Hardened(Reference):
    """One method a step, those of ``Reference``; what differs is how a rung is set up."""

    declared_errors: tuple[type[BaseException], ...] = (WorkspaceUnavailable, GroupFailed, InputTooLarge)
    #: Results say it: FlashInfer's own creation is not what ran.
    own_sequence = True

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._undo = Undo()
        self._group_failure = ""

    def create(self) -> Workspace | None:
        """The best workspace that works on every rank, or None for the plain
        all-reduce. Raises WorkspaceUnavailable or GroupFailed."""
        if self._workspace is None:
            self._check_group()
        workspace: Workspace | None = super().create()
        return workspace

    def use(self, tensor: torch.Tensor) -> torch.Tensor:
        """The all-reduce, by whatever rung the ranks agreed on. Raises GroupFailed, InputTooLarge."""
        if self._workspace is None:
            return self._ask_group(lambda: plain_all_reduce(tensor, self._environment.group))
        result: torch.Tensor = self._workspace.all_reduce(tensor)
        return result

    def collective(self) -> None:
        """One barrier on the group. Raises GroupFailed."""
        self._ask_group(super().collective)

    # ---------------------------------------------------------------- a rung

    def _try(self, backend: str) -> bool:
        """Set one rung up; all ranks return the same, or raise GroupFailed."""
        setup = Setup(self._environment)
        with self._environment.window(backend):
            try:
                workspace = set_up(setup, backend)
            except StepFailed as failure:
                self._give_back(setup.undo, backend)
                self._failed[backend] = str(failure)
                level = logging.WARNING if backend != self._ladder[-1] else logging.ERROR
                logger.log(level, "rank %d: %s is not used: %s", self._environment.rank, backend, failure)
                return False
            except BaseException as failure:
                self._give_back(setup.undo, backend)
                if isinstance(failure, GroupFailed):
                    self._remember(failure)
                raise
        self._workspace, self._undo = workspace, setup.undo
        return True

    def _destroy(self, workspace: Any) -> None:
        """Give the workspace's memory back, once this rank's own kernels have ended."""
        undo, self._undo = self._undo, Undo()
        # First of all: whatever it says, what can be given back is given back.
        undo.add(torch.cuda.synchronize)
        with self._environment.window(workspace.backend):
            self._give_back(undo, workspace.backend)

    def _give_back(self, undo: Undo, backend: str) -> None:
        problems = undo.all()
        if problems:
            logger.warning(
                "rank %d: not all of %s could be given back: %s",
                self._environment.rank,
                backend,
                "; ".join(problems),
            )

    # --------------------------------------------------------------- the group

    def _ask_group(self, collective: Callable[[], T]) -> T:
        """A collective outside of the set-up; its failure is remembered like that of a vote."""
        self._check_group()
        try:
            return collective()
        except Exception as error:
            failure = GroupFailed(f"the process group failed: {words(error)}")
            self._remember(failure)
            raise failure from error

    def _remember(self, failure: GroupFailed) -> None:
        self._group_failure = str(failure)
        logger.error("rank %d: the group is given up: %s", self._environment.rank, failure)

    def _check_group(self) -> None:
        """A group that failed is not asked again: its ranks may be at different collectives."""
        if self._group_failure:
            raise GroupFailed(self._group_failure)
