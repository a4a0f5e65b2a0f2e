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


class LooksIntoTheCapture(Plain):
    """Raises unless a capture is what CUDA says of one: asked as torch is, with operations before and
    after the all-reduce, and with no result in it."""

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self.uses = 0

    def use(self, tensor: Any) -> Any:
        import threading

        import torch

        self.uses += 1
        captured = self.uses <= 2
        assert torch.cuda.is_current_stream_capturing() is captured
        assert torch.cuda.graphs.is_current_stream_capturing() is captured
        elsewhere: list[bool] = []
        thread = threading.Thread(target=lambda: elsewhere.append(torch.cuda.is_current_stream_capturing()))
        thread.start()
        thread.join()
        assert elsewhere == [False]
        given = tensor.clone()
        given.add_(1)
        summed = plain_all_reduce(given, self.environment.group)
        assert summed.equal(tensor) is captured
        return summed - self.environment.world_size


class WaitsOnAHandle(Plain):
    """Asks for its all-reduce and waits for it on the handle."""

    def use(self, tensor: Any) -> Any:
        import torch.distributed as dist

        result = tensor.clone()
        handle = dist.all_reduce(result, group=self.environment.group, async_op=True)
        handle.wait()
        return result


class SpoilsItsCapture(Plain):
    """Rank 0 alone waits for the device in a capture; its peer replays and waits for it."""

    def use(self, tensor: Any) -> Any:
        import contextlib

        import torch

        if self.environment.rank == 0:
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize()
        return super().use(tensor)


class TalksInTheCapture(Plain):
    """Gathers objects in each use: on its caller's group, or on one of its own for the host."""

    host_alone = False

    def create(self) -> Any:
        import torch.distributed as dist

        self.group = dist.new_group(backend="gloo") if self.host_alone else self.environment.group

    def use(self, tensor: Any) -> Any:
        import contextlib

        import torch.distributed as dist

        gathered: list[Any] = [None] * self.environment.world_size
        with contextlib.suppress(RuntimeError):
            dist.all_gather_object(gathered, self.environment.rank, group=self.group)
        return super().use(tensor)


class TalksOnTheHost(TalksInTheCapture):
    """The same on a group that needs no device."""

    host_alone = True


Leaked: list[Any] = []


class NoVoteOnAddDevice(Hardened):
    """``hardened`` without the vote that its peers' blocking calls rely on."""

    def create(self) -> Any:
        original = steps.Setup.together

        def together(setup: Any, name: str, step: Any) -> Any:
            return step() if name == "add the device" else original(setup, name, step)

        steps.Setup.together = together  # type: ignore[method-assign]  # The process ends with the scenario.
        return super().create()
