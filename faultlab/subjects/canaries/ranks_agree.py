"""Canaries of ``ranks_agree``: the ranks decide for themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from faultlab.subjects.canaries.base import Canary
from faultlab.subjects.preflight import StepFailed


class FallsBackAlone(Canary):
    """One rank changes its mind after the vote and tells nobody (vllm#53377)."""

    seed = "create-and-destroy[case=no-fault,ranks=2]"
    breaks = frozenset({"ranks_agree", "truthful_ready"})
    #: Where the group then reduces it waits for itself, and an order is dropped without an error.
    also_breaks = frozenset({"bounded_init", "user_choice"})

    def create(self) -> Any:
        workspace = super().create()
        if self._environment.rank == 1 and workspace is not None:
            self.destroy()
            return None
        return workspace


class NoVote(Canary):
    """Every rank goes by its own exception: the one that met it falls back, its peers use
    the workspace and wait for it in their first kernel (vLLM up to 0.33.0, vllm#53377)."""

    seed = "creation-exception[topology=pcie-4,ranks=2,case=mocked-one]"
    breaks = frozenset({"bounded_init", "ranks_agree", "truthful_ready"})

    def _voted(self, name: str, make: Callable[[], Any]) -> Any:
        workspace, problem = None, ""
        try:
            workspace = make()
            problem = self.why_unusable(workspace)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if not problem:
            return workspace
        if workspace is not None:
            self._destroy(workspace)
        raise StepFailed(f"{name} failed on this rank: {problem}")


class AnErrorOfItsOwn(Canary):
    """The rank that met the error raises it as it came, and its peers say that another
    rank could not (pytorch#165685: the same error is wanted on both)."""

    seed = "ordered-and-refused[backend=mnnvl,case=refused-on-one,ranks=2]"
    breaks = frozenset({"ranks_agree"})
    declared_errors = (RuntimeError,)

    _own = ""

    def _create(self, backend: str) -> Any:
        try:
            return super()._create(backend)
        except RuntimeError as error:
            self._own = str(error)
            raise

    def create(self) -> Any:
        try:
            return super().create()
        except RuntimeError:
            if self._own:
                raise RuntimeError(self._own) from None
            raise


CANARIES: dict[str, type[Canary]] = {
    "falls-back-alone": FallsBackAlone,
    "no-vote": NoVote,
    "an-error-of-its-own": AnErrorOfItsOwn,
}
