"""The seam at the process group: the collectives of ``torch.distributed``.

Each collective is announced before it is entered, with its group, its number
in that group and the ranks it needs, so that the supervisor can tell a rank
that waits from one that runs. A collective made of others (the object
collectives) counts once. What a module bound to a name of its own before the
rank started (``from torch.distributed import barrier``) is not at this seam.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any

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
    signature = inspect.signature(original)

    def collective(*args: Any, **kwargs: Any) -> Any:
        if getattr(nesting, "inside", False):
            return original(*args, **kwargs)
        bound = signature.bind_partial(*args, **kwargs).arguments
        if bound.get("async_op"):
            # It returns at once; whoever waits on the handle is not seen here.
            return original(*args, **kwargs)

        def real() -> Any:
            nesting.inside = True
            try:
                return original(*args, **kwargs)
            finally:
                nesting.inside = False

        group = bound.get("group")
        return seam.injector.call(
            site,
            real,
            RAISING,
            argument=_group_name(None if name == "new_group" else group),
            wait=lambda: _wait(seam, name, needs, bound),
        )

    collective.__name__ = name
    return collective


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
