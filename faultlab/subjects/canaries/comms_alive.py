"""Canaries of ``comms_alive``: the group does not work afterwards."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from faultlab.subjects.canaries.base import Canary


class TakesTheGroupDown(Canary):
    """Tears down process groups that belong to its caller (vllm#36955: who ends what,
    and when, as the interpreter exits)."""

    seed = "no-fault[topology=hgx-h100-8,ranks=2,creation=mocked]"
    breaks = frozenset({"comms_alive"})

    def exit(self) -> None:
        super().exit()
        dist.destroy_process_group()


def _shut_down(descriptor: int) -> None:
    """End a connection to a peer; what only listens, or stays on this host, is left alone."""
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family != socket.AF_UNIX and connection.getpeername():
            connection.shutdown(socket.SHUT_RDWR)


class CutsTheGroupOff(Canary):
    """Breaks off what a failed set-up left in flight, as a time-out does: gloo then closes
    the connections of the whole group (vLLM 0.33.0, vllm#53377: the CPU group is dead)."""

    seed = "create-and-destroy[case=refused-on-all,ranks=2]"
    breaks = frozenset({"comms_alive"})

    def exit(self) -> None:
        super().exit()
        if not self._failed:
            return
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                if descriptor.is_socket():
                    _shut_down(int(descriptor.name))


class AnotherCollective(Canary):
    """One rank takes another way through the code and meets its peers' all-reduce with
    another call: it pairs up by luck, and the ranks are out of step (pytorch#196082)."""

    seed = "no-fault[topology=hgx-h100-8,ranks=2,creation=mocked]"
    breaks = frozenset({"comms_alive"})

    def create(self) -> Any:
        workspace = super().create()
        told = torch.ones(1)
        if self._environment.rank == 1:
            dist.all_reduce_coalesced([told], group=self._environment.group)
        else:
            dist.all_reduce(told, group=self._environment.group)
        return workspace


CANARIES: dict[str, type[Canary]] = {
    "takes-the-group-down": TakesTheGroupDown,
    "cuts-the-group-off": CutsTheGroupOff,
    "another-collective": AnotherCollective,
}
