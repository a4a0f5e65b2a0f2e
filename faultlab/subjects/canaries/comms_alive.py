"""Canaries of ``comms_alive``: the group does not work afterwards."""

from __future__ import annotations

import torch.distributed as dist

from faultlab.subjects.canaries.base import Canary


class TakesTheGroupDown(Canary):
    """Tears down process groups that belong to its caller."""

    breaks = frozenset({"comms_alive"})

    def exit(self) -> None:
        super().exit()
        dist.destroy_process_group()


CANARIES = {
    "takes-the-group-down": TakesTheGroupDown,
}
