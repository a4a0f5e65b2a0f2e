"""What a capturing stream records, and its replay.

A capture runs nothing: a kernel that is launched, and a collective of the group,
are only recorded (``Recording.add``), and so is every torch operation between
them, because real tensors lie on the device and their operations are kernels of
that stream too. Here the tensors lie in host memory: an operation is made at once,
for the shape of what it returns, and made again at the replay, when its inputs
hold their true values; what it returned first is filled then, and what it changed
in place is put back at once. So a result is there after the replay and not before,
and new values in an input reach it. What needs no tensor (``torch.zeros``) is made
at the capture alone: the one replay finds it as it was made.

Left out: which tensors a program meant for the host. Their operations are recorded as
well, and to read a value (``item()``) is not refused, as a device tensor refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from faultlab.errors import UnknownCall

#: Where the process group's own methods end: they return before they are done, so they
#: are made at once. What the seam sees of a group it records whole.
_COLLECTIVES: Final = "c10d"


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
        # Whichever mode made a tensor, it may be filled in this one.
        with torch.inference_mode():
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
        if self._paused or operation.namespace == _COLLECTIVES or not _has_a_tensor(args, given):
            return operation(*args, **given)
        changed = [(each, each.clone()) for each in _written(operation, args, given)]
        first = operation(*args, **given)
        for tensor, before in changed:
            if tensor.shape == before.shape:
                tensor.copy_(before)
        self.add(lambda: _again(operation, args, given, first))
        return first


def _has_a_tensor(args: Any, given: dict[str, Any]) -> bool:
    return any(isinstance(each, torch.Tensor) for each in tree_leaves((args, given)))


def _written(operation: Any, args: Any, given: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation changes, by what it says of its own arguments."""
    found = []
    for index, told in enumerate(operation._schema.arguments):
        if told.alias_info is not None and told.alias_info.is_write:
            value = args[index] if index < len(args) else given.get(told.name)
            found += [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
    return found


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
