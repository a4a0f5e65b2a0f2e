"""Canaries of ``truthful_ready``: "created" is said where it is not so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from faultlab.subjects.canaries.base import Canary
from faultlab.subjects.preflight import StepFailed, vote
from faultlab.subjects.reference import Reference

logger = logging.getLogger("faultlab.canaries")


class ReadyWhereItWorked(Canary):
    """Something after the vote fails on one rank, which raises what its peers never hear
    of (vLLM 0.33.0: its group map is filled outside of the try)."""

    seed = "create-and-destroy[case=no-fault,ranks=2]"
    breaks = frozenset({"ranks_agree", "truthful_ready"})
    #: A rank that raised uses nothing, and its peers wait for it in their kernel.
    also_breaks = frozenset({"bounded_init"})
    declared_errors = (*Reference.declared_errors, MemoryError)

    def create(self) -> Any:
        workspace = super().create()
        if self._environment.rank == 1 and workspace is not None:
            self.destroy()
            raise MemoryError("only on this rank")
        return workspace


class IgnoresTheVote(Canary):
    """The vote on the result is held, and its answer is lost in a debug message: the rank
    that succeeded says "created" (SGLang 0.5.23)."""

    seed = "create-and-destroy[case=refused-on-one,ranks=2]"
    breaks = frozenset({"ranks_agree", "truthful_ready"})
    #: Where the group then reduces, it waits for the rank that fell back.
    also_breaks = frozenset({"bounded_init"})

    def _voted(self, name: str, make: Callable[[], Any]) -> Any:
        workspace, problem = None, ""
        try:
            workspace = make()
            problem = self.why_unusable(workspace)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        try:
            vote(self._environment, name, problem)
        except StepFailed as failure:
            if problem:
                if workspace is not None:
                    self._destroy(workspace)
                raise
            logger.debug("not heard: %s", failure)
        return workspace


CANARIES: dict[str, type[Canary]] = {
    "own-success": ReadyWhereItWorked,
    "ignores-the-vote": IgnoresTheVote,
}
