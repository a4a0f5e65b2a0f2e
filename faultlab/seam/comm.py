"""The seam at the process group: the collectives of ``torch.distributed``.

Each collective is announced before it is entered, with its group, its number
in that group and the ranks it needs, so that the supervisor can tell a rank
that waits from one that runs. A collective made of others (the object
collectives) counts once.

While a stream captures, a collective of tensors is recorded and made at the replay,
as NCCL's are; gloo stands for NCCL here. Those that need their answer on the host
(objects, barriers) wait for the device, which a capturing stream refuses; only a
group that was made with ``backend="gloo"`` makes them without the device, at once.

What a module bound to a name of its own before the
rank started (``from torch.distributed import barrier``) is not at this seam.
"""

from __future__ import annotations

import inspect
import threading
from functools import partial
from typing import Any

from faultlab.seam import runtime
from faultlab.seam.base import Seam
from faultlab.seam.conventions import RAISING

#: torch.distributed's function: the site, and whose arrival a rank needs.
#: "all": every member; "source": receivers need the root; "root": the root
#: needs the members; "peer": the other end.
_FUNCTIONS: dict[str, tuple[str, str]] = {
    "all_gather": ("comm.allgather", "all"),
    "all_gather_into_tensor": ("comm.allgather", "all"),
    "all_gather_object": ("comm.allgather", "all"),
    "all_gather_coalesced": ("comm.allgather", "all"),
    "all_reduce": ("comm.allreduce", "all"),
    "all_reduce_coalesced": ("comm.allreduce", "all"),
    "barrier": ("comm.barrier", "all"),
    "monitored_barrier": ("comm.barrier", "all"),
    "broadcast": ("comm.broadcast", "source"),
    "broadcast_object_list": ("comm.broadcast", "source"),
    "gather": ("comm.gather", "root"),
    "gather_object": ("comm.gather", "root"),
    "reduce": ("comm.reduce", "root"),
    "scatter": ("comm.scatter", "source"),
    "scatter_object_list": ("comm.scatter", "source"),
    "reduce_scatter": ("comm.reduce_scatter", "all"),
    "reduce_scatter_tensor": ("comm.reduce_scatter", "all"),
    "all_to_all": ("comm.alltoall", "all"),
    "all_to_all_single": ("comm.alltoall", "all"),
    "new_group": ("comm.new_group", "all"),
}


#: What waits on the host for its answer: NCCL waits for the stream in each of these
#: (ProcessGroupNCCL.cpp, barrier; distributed_c10d.py, _object_to_tensor and _tensor_to_object).
_ON_HOST = frozenset(
    {
        "all_gather_object",
        "broadcast_object_list",
        "gather_object",
        "scatter_object_list",
        "barrier",
        "monitored_barrier",
    }
)


class Recorded:
    """The handle of a collective that a capture recorded: the stream waits for it, nobody else."""

    def wait(self, timeout: Any = None) -> bool:
        """It is in order on the stream."""
        return True

    def is_completed(self) -> bool:
        """It is not: it has not even begun."""
        return False


def install(seam: Seam) -> None:
    """Replace the collectives in both modules that hold them."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    nesting = threading.local()
    for name, (site, needs) in _FUNCTIONS.items():
        original = getattr(c10d, name, None)
        if original is None:
            continue
        function = _collective(seam, nesting, name, original, site, needs)
        setattr(c10d, name, function)
        if hasattr(dist, name):
            setattr(dist, name, function)


def _collective(seam: Seam, nesting: threading.local, name: str, original: Any, site: str, needs: str) -> Any:
    # None of these takes *args, so a name for each position is all there is to bind.
    parameters = tuple(inspect.signature(original).parameters)

    def collective(*args: Any, **kwargs: Any) -> Any:
        if getattr(nesting, "inside", False):
            return original(*args, **kwargs)
        bound = {**dict(zip(parameters, args, strict=False)), **kwargs}
        label = _group_name(None if name == "new_group" else bound.get("group"))
        recorded = seam.machine.capturing() and name != "new_group" and label not in seam.groups.on_host
        made_now = partial(original, *args, **kwargs)
        if bound.get("async_op") and not recorded:
            # It returns at once; whoever waits on the handle is not seen here.
            return made_now()
        if bound.get("async_op"):
            made_now = partial(original, **{**bound, "async_op": False})

        def real() -> Any:
            nesting.inside = True
            try:
                with seam.machine.on_host():
                    return made_now()
            finally:
                nesting.inside = False

        def wait() -> dict[str, Any]:
            return _wait(seam, name, needs, bound)

        if recorded:
            captured = _captured(seam, name, site, real, wait)
            seam.injector.call(site, captured, RAISING, argument=label)
            return Recorded() if bound.get("async_op") else None
        made = seam.injector.call(site, real, RAISING, argument=label, wait=wait)
        if name == "new_group" and str(bound.get("backend")) == "gloo":
            seam.groups.on_host.add(_group_name(made))
        return made

    collective.__name__ = name
    return collective


def _captured(seam: Seam, name: str, site: str, real: Any, wait: Any) -> Any:
    """A collective while a stream captures: refused if it waits on the host, else recorded."""

    def replayed() -> None:
        with seam.injector.waiting(site, wait()):
            real()

    def recorded() -> None:
        if name in _ON_HOST:
            runtime.synchronize(seam)
        seam.machine.in_stream(replayed)

    return recorded


def _group_name(group: Any) -> str:
    import torch.distributed as dist

    resolved = group if group is not None else dist.group.WORLD
    return str(getattr(resolved, "group_name", "world"))


def _wait(seam: Seam, name: str, needs: str, bound: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist

    group = None if name == "new_group" else bound.get("group")
    label = _group_name(group)
    members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    number = seam.groups.enter(label, name)
    root = _root(bound, members)
    others = [member for member in members if member != seam.rank]
    if needs == "source":
        others = [root] if root != seam.rank else []
    elif needs == "root" and root != seam.rank:
        others = []
    return {
        "kind": "collective",
        "group": label,
        "number": number,
        "needs": others,
        "deadline": seam.link.now() + seam.scenario.budget.group_timeout_s,
        "text": f"{name} number {number} of group {label}",
    }


def _root(bound: dict[str, Any], members: list[int]) -> int:
    """The global rank of the root, however the caller named it."""
    for key in ("src", "dst"):
        if bound.get(key) is not None:
            return int(bound[key])
    for key in ("group_src", "group_dst"):
        if bound.get(key) is not None:
            return members[int(bound[key])]
    return members[0]
