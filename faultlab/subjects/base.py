"""The subject: the code under test, with one method a step.

To put your own code under test, write a class with these methods and name it
in a scenario as ``subject: package.module:ClassName``; the lab calls it with an
``Environment``. Nothing of the lab needs to be imported: the methods are all
that is asked.

    class MyConsumer:
        declared_errors = (RuntimeError,)   # what create and use may raise on purpose
        logs = True                         # its loggers reach the root, and its messages are judged
        ladder = ("mnnvl", "trtllm")        # the rungs it may choose by itself, best first; or ()
        own_sequence = False                # True: results say that FlashInfer's creation is not what ran

        def __init__(self, environment): ...
        def create(self): ...               # set up; return the workspace, or None for "none"
        def use(self, tensor): ...          # all-reduce; return the result
        def collective(self): ...           # one plain collective on the group
        def destroy(self): ...              # give everything back; may be called twice
        def exit(self): ...                 # what runs when the interpreter ends

A method that raises ends its step, not the workload. Where ``logs`` is true, ``clear_log``
wants one message at WARNING or above for a fallback that a fault caused: the call that
failed, its error and the rank. ``ladder`` is what ``best_fallback`` goes by.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Environment:
    """What a subject is given.

    ``group``: the process group of the ranks (gloo or NCCL). ``backend``: the
    user's order, or ``auto``. ``preferred``: where an automatic choice begins.
    ``window``: marks a part of the set-up for a fault's ``during``; without the
    lab it does nothing.
    """

    rank: int
    world_size: int
    device: torch.device
    group: Any
    backend: str
    preferred: str | None
    max_token_num: int
    hidden_dim: int
    dtype: torch.dtype
    window: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()


class Subject(Protocol):
    """One method a step; see the module."""

    declared_errors: tuple[type[BaseException], ...]
    logs: bool
    ladder: tuple[str, ...]
    own_sequence: bool

    def create(self) -> Any: ...

    def use(self, tensor: torch.Tensor) -> torch.Tensor: ...

    def collective(self) -> None: ...

    def destroy(self) -> None: ...

    def exit(self) -> None: ...


def plain_all_reduce(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """The last rung: the process group's own all-reduce, on a copy."""
    import torch.distributed as dist

    result = tensor.clone()
    dist.all_reduce(result, group=group)
    return result
