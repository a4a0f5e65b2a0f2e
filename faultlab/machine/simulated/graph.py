"""What a capturing stream records, and its replay.

A capture runs nothing: a kernel that is launched, and a collective of the group,
are only recorded (``Recording.add``), and so is every torch operation between
them, because real tensors lie on the device and their operations are kernels of
that stream too. Here the tensors lie in host memory: an operation is made at once,
for the shape of what it returns, and made again at the replay, when its inputs
hold their true values; what it returned first is filled then. So a result is
there after the replay and not before, and new values in an input reach it.

Left out: an operation that changes a tensor in place is made once more than on a
device, at the capture itself, and host values that torch made (``item()``) are not
refused here as a device tensor refuses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from faultlab.errors import UnknownCall

#: Not of the stream: the collectives' own operations, which the seam records whole.
_NOT_RECORDED: Final = ("c10d", "_c10d_functional")


class Recording(TorchDispatchMode):  # type: ignore[misc]
    """The work of one capture, in the order of the stream."""

    def __init__(self) -> None:
        super().__init__()
        self._work: list[Callable[[], None]] = []
        self._paused = False

    def add(self, work: Callable[[], None]) -> None:
        """Record work that is to be done at the replay alone."""
        self._work.append(work)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What the machine itself does with tensors, to answer a call, is not of the stream."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def replay(self, goes_on: Callable[[], bool]) -> None:
        """Do the work in its order, as long as the stream goes on."""
        with torch.no_grad():
            for work in self._work:
                if not goes_on():
                    return
                work()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import its compiler to keep this class out of it: nothing is compiled here, and
        the import takes seconds and leaves a folder and a variable behind."""
        return False

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        first = operation(*args, **given)
        if not self._paused and operation.namespace not in _NOT_RECORDED:
            self.add(lambda: _again(operation, args, given, first))
        return first


def _again(operation: Any, args: Any, given: dict[str, Any], first: Any) -> None:
    """Make an operation once more, and fill what it returned at the capture."""
    made, told = tree_leaves(operation(*args, **given)), tree_leaves(first)
    for old, new in zip(told, made, strict=True):
        if not isinstance(old, torch.Tensor) or _same_memory(old, new):
            continue
        if old.shape != new.shape:
            raise UnknownCall(f"{operation} gave another shape at the replay of a captured graph")
        old.copy_(new)


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the operation returned a view, or its own input."""
    return bool(one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr())
