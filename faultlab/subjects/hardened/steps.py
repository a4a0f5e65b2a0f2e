"""Steps and votes: what one rank does, and what the group makes of it.

Promise: after ``together`` either every rank goes on or every rank raises the
same StepFailed; ``Undo`` gives back all that can be given back, last first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from faultlab.subjects.base import Environment
from faultlab.subjects.preflight import StepFailed, vote

T = TypeVar("T")


class CallFailed(RuntimeError):
    """A call of the driver or the runtime answered an error; the text names both."""


class GroupFailed(RuntimeError):
    """A collective failed: what the other ranks decided is not known, and not asked again."""


class Undo:
    """What has to be given back, in the order in which it was taken."""

    def __init__(self) -> None:
        self._releases: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def add(self, release: Callable[..., Any], *arguments: Any) -> None:
        """Remember a release: ``release(*arguments)``."""
        self._releases.append((release, arguments))

    def all(self) -> list[str]:
        """Give everything back, last first; what could not be, in words. Never raises."""
        problems = []
        while self._releases:
            release, arguments = self._releases.pop()
            try:
                release(*arguments)
            except Exception as error:
                problems.append(words(error))
        return problems


class Setup:
    """One attempt of all ranks to set up one rung."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.rank = environment.rank
        self.world_size = environment.world_size
        self.device: int = environment.device.index
        self.undo = Undo()

    def together(self, name: str, step: Callable[[], T]) -> T:
        """Do a step on this rank, then vote; what the step returned.

        ``step`` makes no collective. Raises StepFailed on every rank if it
        failed on any, GroupFailed if the vote could not be held.
        """
        result, problem = None, ""
        try:
            result = step()
        except Exception as error:
            problem = words(error)
        try:
            vote(self.environment, name, problem)
        except StepFailed:
            raise
        except Exception as error:
            raise _group_failed(name, error) from error
        return result  # type: ignore[return-value]  # Without a problem the step returned.

    def gather(self, name: str, value: T) -> list[T]:
        """Every rank's value, by rank. Raises GroupFailed."""
        values: list[Any] = [None] * self.world_size
        try:
            dist.all_gather_object(values, value, group=self.environment.group)
        except Exception as error:
            raise _group_failed(name, error) from error
        return values


def words(error: BaseException) -> str:
    """An error for people; one that names its call needs no type."""
    return str(error) if isinstance(error, CallFailed) else f"{type(error).__name__}: {error}"


def _group_failed(name: str, error: BaseException) -> GroupFailed:
    return GroupFailed(f"the process group failed in the vote on {name!r}: {words(error)}")


def driver(name: str, *arguments: Any) -> Any:
    """Call the driver: the value, if any. Raises CallFailed."""
    from cuda.bindings import driver as cuda

    try:
        result = getattr(cuda, name)(*arguments)
    except Exception as error:
        raise CallFailed(f"{name}: {words(error)}") from error
    if int(result[0]):
        raise CallFailed(f"{name}: {result[0].name} ({int(result[0])})")
    return result[1] if len(result) > 1 else None


def runtime(name: str, *arguments: Any) -> Any:
    """Call the CUDA runtime by FlashInfer's binding: the value, if any. Raises CallFailed."""
    from flashinfer.comm.cuda_ipc import cudart

    try:
        return getattr(cudart, name)(*arguments)
    except Exception as error:
        raise CallFailed(f"{name}: {error}") from error
