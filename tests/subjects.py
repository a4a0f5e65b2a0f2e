"""Subjects that the tests name in scenarios, as a user would name their own."""

from __future__ import annotations

from typing import Any

from faultlab.subjects.base import plain_all_reduce
from faultlab.subjects.hardened import Hardened, steps


class Plain:
    """Never sets anything up: the smallest subject there is."""

    declared_errors: tuple[type[BaseException], ...] = ()
    logs = False

    def __init__(self, environment: Any) -> None:
        self.environment = environment

    def create(self) -> Any:
        return None

    def use(self, tensor: Any) -> Any:
        return plain_all_reduce(tensor, self.environment.group)

    def collective(self) -> None:
        import torch.distributed as dist

        dist.barrier(group=self.environment.group)

    def destroy(self) -> None:
        return None

    def exit(self) -> None:
        return None


class CallsTheUnknown(Plain):
    """Calls a driver function that the simulated machine does not know."""

    def create(self) -> Any:
        from cuda.bindings import driver

        driver.cuMemPoolCreate(None)


class RaisesOnOneRank(Plain):
    """Rank 1 alone raises: the ranks disagree."""

    def create(self) -> Any:
        if self.environment.rank == 1:
            raise OSError("only here")


class WrongSum(Plain):
    """Returns a wrong result."""

    def use(self, tensor: Any) -> Any:
        return plain_all_reduce(tensor, self.environment.group) + 1


class LeaksThings(Plain):
    """Leaves a descriptor, a temporary folder and a thread behind."""

    def create(self) -> Any:
        import tempfile
        import threading

        self.kept = open("/dev/null")  # noqa: SIM115, PTH123
        self.folder = tempfile.mkdtemp()
        self.stop = threading.Event()
        threading.Thread(target=self.stop.wait, daemon=True).start()

    def exit(self) -> None:
        Leaked.append(self)


class SpinsForEver(Plain):
    """Never waits and never returns."""

    def create(self) -> Any:
        while True:
            sum(range(1000))


class SkipsACollective(Plain):
    """Rank 1 makes one collective less than its peers, out of step with them."""

    def create(self) -> Any:
        import torch.distributed as dist

        if self.environment.rank == 0:
            dist.barrier(group=self.environment.group)


Leaked: list[Any] = []


class NoVoteOnAddDevice(Hardened):
    """``hardened`` without the vote that its peers' blocking calls rely on."""

    def create(self) -> Any:
        original = steps.Setup.together

        def together(setup: Any, name: str, step: Any) -> Any:
            return step() if name == "add the device" else original(setup, name, step)

        steps.Setup.together = together  # type: ignore[method-assign]  # The process ends with the scenario.
        return super().create()
