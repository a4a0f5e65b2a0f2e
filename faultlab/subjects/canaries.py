"""The canaries: consumers broken on purpose, each in one way, to prove that the lab sees it.

Every canary is ``reference`` with one mistake that users met in real consumers.
``breaks`` is the exact set of invariants it breaks when run on ``scenario``, and a
test compares the two, so that an oracle that cannot fail is found out.

To add one: write a class with its one mistake, declare ``breaks`` and the keys of
``scenario`` that provoke it, and name it in ``CANARIES`` as ``<invariant>-<variant>``.
"""

from __future__ import annotations

import random
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from faultlab.subjects.reference import Reference

#: Keys of the scenario file that provoke a canary, over a plain one with mocked creation.
Provocation = dict[str, Any]

_NULL: Provocation = {"faults": [{"at": "workspace.mc_ptr", "effect": {"value": 0}}]}
_CREATE_FAILS: Provocation = {
    "faults": [{"at": "workspace.create", "effect": {"error": "CUDA_ERROR_NOT_SUPPORTED"}}]
}
_SHORT: Provocation = {"workload": ["create", "destroy", "exit"]}


class Canary(Reference):
    """What every canary declares."""

    breaks: ClassVar[frozenset[str]]
    scenario: ClassVar[Provocation] = {}


class PointerNotChecked(Canary):
    """Gives the kernel whatever creation returned (vllm#49043)."""

    breaks = frozenset({"no_cuda_crash"})
    scenario = _NULL

    def why_unusable(self, workspace: Any) -> str:
        return ""


class NoPreflight(Canary):
    """Walks into FlashInfer's sequence without asking whether every rank can (pytorch#195596)."""

    breaks = frozenset({"bounded_init"})
    scenario: ClassVar[Provocation] = {
        "workspace": {"creation": "real"},
        "faults": [
            {"at": "cuMulticastAddDevice", "ranks": [1], "effect": {"error": "CUDA_ERROR_ILLEGAL_STATE"}}
        ],
    }

    def preflight(self, backend: str) -> None:
        return


class FallsBackAlone(Canary):
    """One rank changes its mind after the vote and tells nobody."""

    breaks = frozenset({"ranks_agree", "truthful_ready"})
    scenario = _SHORT

    def create(self) -> Any:
        workspace = super().create()
        if self._environment.rank == 1:
            self.destroy()
            return None
        return workspace


class ReadyWhereItWorked(Canary):
    """Each rank reports its own success: one raises what its peers never hear of."""

    breaks = frozenset({"ranks_agree", "truthful_ready"})
    scenario = _SHORT
    declared_errors = (*Reference.declared_errors, MemoryError)

    def create(self) -> Any:
        workspace = super().create()
        if self._environment.rank == 1:
            self.destroy()
            raise MemoryError("only on this rank")
        return workspace


class NeverGivesBack(Canary):
    """Destroy does nothing."""

    breaks = frozenset({"no_leak"})

    def destroy(self) -> None:
        return


class LeavesAFolder(Canary):
    """A temporary folder per creation stays behind."""

    breaks = frozenset({"no_leak"})

    def create(self) -> Any:
        import tempfile

        tempfile.mkdtemp(prefix="canary-")
        return super().create()


class TakesTheGroupDown(Canary):
    """Tears down process groups that belong to its caller."""

    breaks = frozenset({"comms_alive"})

    def exit(self) -> None:
        super().exit()
        dist.destroy_process_group()


class WrongSum(Canary):
    """Returns something near the sum."""

    breaks = frozenset({"correct_result"})

    def use(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().use(tensor) + 1


class DropsTheInvalid(Canary):
    """Finds the null pointer and forgets the object without destroying it."""

    breaks = frozenset({"destroy_called"})
    scenario = _NULL

    def _destroy(self, workspace: Any) -> None:
        if self.why_unusable(workspace):
            return
        super()._destroy(workspace)


class RetriesPerCall(Canary):
    """Forgets what failed, and tries it again at the next call (vllm#51986)."""

    breaks = frozenset({"fail_once"})
    scenario = _CREATE_FAILS

    def create(self) -> Any:
        self._failed.clear()
        return super().create()


class ReseedsTheRandomState(Canary):
    """Seeds the caller's generator for a socket's name and leaves it so."""

    breaks = frozenset({"state_neutral"})

    def create(self) -> Any:
        random.seed(1234)
        return super().create()


class ChangesTheDefaultDtype(Canary):
    """Leaves torch's default dtype changed."""

    breaks = frozenset({"state_neutral"})

    def create(self) -> Any:
        torch.set_default_dtype(torch.float64)
        return super().create()


class DestroyErrorEscapes(Canary):
    """An error of destroy goes to whoever tears the engine down (vLLM 0.33.0)."""

    breaks = frozenset({"teardown_clean"})
    scenario: ClassVar[Provocation] = {
        "faults": [{"at": "workspace.destroy", "calls": 1, "effect": {"raise": "RuntimeError"}}]
    }

    def _destroy(self, workspace: Any) -> None:
        workspace.destroy()


class ReplacesTheChoice(Canary):
    """Gives trtllm to a user who ordered mnnvl."""

    breaks = frozenset({"user_choice"})
    scenario: ClassVar[Provocation] = {
        "workspace": {"creation": "mocked", "backend": "mnnvl"},
        "faults": [{"at": "workspace.create", "calls": 1, "effect": {"error": "CUDA_ERROR_NOT_SUPPORTED"}}],
    }

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self._ladder = ("mnnvl", "trtllm")


#: By name, without ``canary:``.
CANARIES: dict[str, type[Canary]] = {
    "no_cuda_crash-pointer-not-checked": PointerNotChecked,
    "bounded_init-no-preflight": NoPreflight,
    "ranks_agree-falls-back-alone": FallsBackAlone,
    "truthful_ready-own-success": ReadyWhereItWorked,
    "no_leak-never-gives-back": NeverGivesBack,
    "no_leak-leaves-a-folder": LeavesAFolder,
    "comms_alive-takes-the-group-down": TakesTheGroupDown,
    "correct_result-wrong-sum": WrongSum,
    "destroy_called-drops-the-invalid": DropsTheInvalid,
    "fail_once-retries-per-call": RetriesPerCall,
    "state_neutral-reseeds": ReseedsTheRandomState,
    "state_neutral-default-dtype": ChangesTheDefaultDtype,
    "teardown_clean-error-escapes": DestroyErrorEscapes,
    "user_choice-replaces": ReplacesTheChoice,
}
