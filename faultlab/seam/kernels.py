"""The seam at FlashInfer's kernel modules: loading them, and the kernels in them.

FlashInfer builds a module at first use and wraps its functions; the lab stands
where the built module would be, so FlashInfer's wrappers run as they are. An
error of a kernel is never returned: it poisons the context and shows later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from faultlab.codes import STICKY
from faultlab.seam.base import Seam
from faultlab.seam.conventions import RAISING


class KernelConvention:
    """A launch reports nothing; its error is sticky."""

    def __init__(self, seam: Seam) -> None:
        self._seam = seam

    def fail(self, site: str, code: str) -> Any:
        assert code in STICKY, code
        self._seam.machine.poison(code)
        self._seam.link.emit("sticky", error=code, site=site, injected=True)

    def result_name(self, result: Any) -> str:
        error = self._seam.machine.context_error()
        return error or "ok"


def install(seam: Seam) -> None:
    """Put the lab's modules where FlashInfer builds its own."""
    from flashinfer.comm import trtllm_ar, trtllm_mnnvl_ar

    trtllm_ar.gen_trtllm_comm_module = lambda: _spec(seam, "trtllm_comm", _trtllm_module)
    trtllm_mnnvl_ar.gen_trtllm_mnnvl_comm_module = lambda: _spec(seam, "trtllm_mnnvl_comm", _mnnvl_module)


def _spec(seam: Seam, name: str, build: Any) -> SimpleNamespace:
    def build_and_load() -> SimpleNamespace:
        loaded = seam.injector.call("kernel.load", lambda: build(seam), RAISING, argument=name)
        assert isinstance(loaded, SimpleNamespace)
        return loaded

    return SimpleNamespace(build_and_load=build_and_load)


def _launch(seam: Seam, site: str, argument: str, output: Any, real: Any) -> None:
    def replace(value: Any) -> None:
        seam.machine.in_stream(lambda: output.add_(value))

    with _telling_of_errors(seam, site):
        seam.injector.call(site, real, KernelConvention(seam), argument=argument, replace=replace)


def replay(seam: Seam) -> None:
    """Replay what the latest capture recorded; an error of its kernels is reported."""
    with _telling_of_errors(seam, "kernel.allreduce"):
        seam.machine.replay()


@contextmanager
def _telling_of_errors(seam: Seam, site: str) -> Iterator[None]:
    """Report the sticky error that a kernel leaves behind here, if it is news."""
    before = seam.machine.context_error()
    yield
    after = seam.machine.context_error()
    if after and not before:
        seam.link.emit("sticky", error=after, site=site, injected=False, reason=_reason(seam))


def _reason(seam: Seam) -> str:
    return str(getattr(seam.machine, "sticky_reason", ""))


def _trtllm_module(seam: Seam) -> SimpleNamespace:
    def lamport_initialize(pointer: int, count: int, dtype: Any) -> None:
        site = "kernel.lamport_initialize"
        _launch(seam, site, "trtllm", None, lambda: seam.machine.call(site, pointer, count, dtype))

    def allreduce_fusion(*args: Any) -> None:
        named = dict(zip(_TRTLLM_ARGUMENTS, args, strict=False))
        _plain_allreduce_only(seam, "trtllm_allreduce_fusion", named["pattern_code"] == 0)
        _launch(
            seam,
            "kernel.allreduce",
            "trtllm",
            named["allreduce_out"],
            lambda: seam.machine.call(
                "kernel.allreduce",
                backend="trtllm",
                input=named["allreduce_in"],
                output=named["allreduce_out"],
                workspace_ptrs=named["workspace_ptrs"],
                world_size=named["world_size"],
                rank=named["world_rank"],
                oneshot=named["use_oneshot"],
                token_num=named["token_num"],
                hidden_dim=named["hidden_dim"],
            ),
        )

    return _module(
        seam,
        "trtllm_comm",
        trtllm_lamport_initialize=lamport_initialize,
        trtllm_allreduce_fusion=allreduce_fusion,
    )


_TRTLLM_ARGUMENTS = (
    "allreduce_in",
    "world_size",
    "world_rank",
    "token_num",
    "hidden_dim",
    "workspace_ptrs",
    "launch_with_pdl",
    "use_oneshot",
    "trigger_completion_at_end",
    "fp32_acc",
    "pattern_code",
    "allreduce_out",
)


def _mnnvl_module(seam: Seam) -> SimpleNamespace:
    def allreduce_fusion(*args: Any) -> None:
        named = dict(zip(_MNNVL_ARGUMENTS, args, strict=False))
        _plain_allreduce_only(seam, "trtllm_mnnvl_allreduce_fusion", not named["rmsnorm_fusion"])
        _launch(
            seam,
            "kernel.allreduce",
            "mnnvl",
            named["output"],
            lambda: seam.machine.call(
                "kernel.allreduce",
                backend="mnnvl",
                input=named["input"],
                output=named["output"],
                mc_ptr=int(named["multicast_buffer_ptr"]),
                uc_ptrs_dev=int(named["buffer_ptrs_dev"]),
                uc_ptr_local=int(named["buffer_ptr_local"]),
                buffer_flags=named["buffer_flags_mnnvl"],
                world_size=named["nranks"],
                rank=named["rank"],
                oneshot=named["use_oneshot"],
            ),
        )

    return _module(seam, "trtllm_mnnvl_comm", trtllm_mnnvl_allreduce_fusion=allreduce_fusion)


_MNNVL_ARGUMENTS = (
    "input",
    "multicast_buffer_ptr",
    "buffer_ptrs_dev",
    "buffer_ptr_local",
    "buffer_flags_mnnvl",
    "nranks",
    "rank",
    "rmsnorm_fusion",
    "launch_with_pdl",
    "use_oneshot",
    "output",
)


def _plain_allreduce_only(seam: Seam, name: str, plain: bool) -> None:
    if not plain:
        raise seam.unknown(f"{name} with a fused pattern")


class _Module(SimpleNamespace):
    """A kernel module: a function that is not here is an unknown call."""

    def __init__(self, seam: Seam, name: str, **functions: Any) -> None:
        super().__init__(**functions)
        self._seam = seam
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._seam.refuse(f"{self._name}.{name}")


def _module(seam: Seam, name: str, **functions: Any) -> SimpleNamespace:
    return _Module(seam, name, **functions)
