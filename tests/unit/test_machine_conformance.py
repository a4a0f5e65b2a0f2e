"""Every recorded answer of the real driver is the simulated machine's answer too.

The recording is tests/data/h200 (2x H200, driver 580.159.04). Each case below
makes the sequence of the recorded case with the same name.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.machines import FABRIC, GRANULE, NONE, POSIX, Driver, access, memory_prop, pair

DATA = Path(__file__).resolve().parent.parent / "data" / "h200"
VECTORS: dict[str, Any] = json.loads((DATA / "driver_vectors.json").read_text())
RECORDED = {key.removeprefix("case."): value for key, value in VECTORS.items() if key.startswith("case.")}
#: In these the real driver killed the process, so there is no answer to compare.
DEADLY = ("export.after_release", "map.bad_handle")

CASES: dict[str, Callable[[Driver], Any]] = {}
HOST = (ctypes.c_ubyte * 64)()
WILD = 0x7F0000000000


@pytest.fixture
def driver() -> Iterator[Driver]:
    board, (first, _) = pair()
    yield first
    board.close()


def case(name: str) -> Callable[[Callable[[Driver], Any]], Callable[[Driver], Any]]:
    def register(function: Callable[[Driver], Any]) -> Callable[[Driver], Any]:
        CASES[name] = function
        return function

    return register


def created(d: Driver, granules: int = 1, types: Any = POSIX) -> Any:
    return d.value("cuMemCreate", granules * GRANULE, memory_prop(types=types), 0)


def reserved(d: Driver, granules: int = 1) -> int:
    return int(d.value("cuMemAddressReserve", granules * GRANULE, GRANULE, 0, 0))


def mapped(d: Driver, granules: int = 1, room: int = 1) -> tuple[Any, int]:
    handle, address = created(d, granules), reserved(d, room)
    d.value("cuMemMap", address, granules * GRANULE, 0, handle, 0)
    return handle, address


def single(name: str, site: str, arguments: Callable[[], tuple[Any, ...]]) -> None:
    """A case that is one call: what is called and with what."""
    CASES[name] = lambda d: d.code(site, *arguments())


single("create.fabric_handle", "cuMemCreate", lambda: (GRANULE, memory_prop(types=FABRIC), 0))
single("create.unaligned_size", "cuMemCreate", lambda: (GRANULE - 1, memory_prop(), 0))
single("create.zero_size", "cuMemCreate", lambda: (0, memory_prop(), 0))
single("create.bad_device", "cuMemCreate", lambda: (GRANULE, memory_prop(99), 0))
single("create.bad_flags", "cuMemCreate", lambda: (GRANULE, memory_prop(), 7))
single("create.too_large", "cuMemCreate", lambda: (1 << 40, memory_prop(), 0))
single("granularity.bad_device", "cuMemGetAllocationGranularity", lambda: (memory_prop(99), 1))
single("import.bad_fd", "cuMemImportFromShareableHandle", lambda: (9999, POSIX))
single("release.zero", "cuMemRelease", lambda: (0,))
single("reserve.zero_size", "cuMemAddressReserve", lambda: (0, GRANULE, 0, 0))
single("reserve.unaligned_size", "cuMemAddressReserve", lambda: (GRANULE + 1, GRANULE, 0, 0))
single("reserve.alignment_not_pow2", "cuMemAddressReserve", lambda: (GRANULE, 3 << 20, 0, 0))
single("memcpy.null_dst", "cuMemcpyHtoD", lambda: (0, ctypes.addressof(HOST), 64))
single("memcpy.wild_dst", "cuMemcpyHtoD", lambda: (WILD, ctypes.addressof(HOST), 64))
single("memset.null_dst", "cuMemsetD8", lambda: (0, 0, 64))
single("alloc.zero", "cuMemAlloc", lambda: (0,))
single("alloc.huge", "cuMemAlloc", lambda: (1 << 42,))
single("memfree.null", "cuMemFree", lambda: (0,))
single("device_get.bad", "cuDeviceGet", lambda: (99,))
single("attribute.bad_device", "cuDeviceGetAttribute", lambda: (132, 99))


@case("export.wrong_type")
def _(d: Driver) -> Any:
    return d.code("cuMemExportToShareableHandle", created(d), FABRIC, 0)


@case("export.no_handle_type_requested")
def _(d: Driver) -> Any:
    return d.code("cuMemExportToShareableHandle", created(d, types=NONE), POSIX, 0)


@case("export.twice_gives_two_fds")
def _(d: Driver) -> Any:
    handle = created(d)
    first, second = (d.value("cuMemExportToShareableHandle", handle, POSIX, 0) for _ in range(2))
    differ = first != second
    os.close(first)
    os.close(second)
    # What the link of the descriptor says is the real driver's alone.
    return [differ, "/dev/nvidiactl"]


@case("import.not_a_cuda_fd")
def _(d: Driver) -> Any:
    fd = os.open("/dev/null", os.O_RDWR)
    try:
        return d.code("cuMemImportFromShareableHandle", fd, POSIX)
    finally:
        os.close(fd)


@case("import.same_process")
def _(d: Driver) -> Any:
    handle = created(d)
    fd = d.value("cuMemExportToShareableHandle", handle, POSIX, 0)
    result = d.cuMemImportFromShareableHandle(fd, POSIX)
    os.close(fd)
    same = int(result[1]) == int(handle)
    return [result[0].name, same, d.code("cuMemRelease", result[1]), d.code("cuMemRelease", handle)]


@case("import.after_exporter_released_fd_open")
def _(d: Driver) -> Any:
    handle = created(d)
    fd = d.value("cuMemExportToShareableHandle", handle, POSIX, 0)
    d.value("cuMemRelease", handle)
    answer = d.code("cuMemImportFromShareableHandle", fd, POSIX)
    os.close(fd)
    return answer


@case("release.twice")
def _(d: Driver) -> Any:
    handle = created(d)
    return [d.code("cuMemRelease", handle), d.code("cuMemRelease", handle)]


@case("reserve.alignment_512MB")
def _(d: Driver) -> Any:
    result = d.cuMemAddressReserve(1 << 29, 1 << 29, 0, 0)
    return [result[0].name, int(result[1]) % (1 << 29) == 0]


@case("free.wrong_size")
def _(d: Driver) -> Any:
    address = reserved(d, 2)
    return [d.code("cuMemAddressFree", address, GRANULE), d.code("cuMemAddressFree", address, 2 * GRANULE)]


@case("free.twice")
def _(d: Driver) -> Any:
    address = reserved(d)
    return [d.code("cuMemAddressFree", address, GRANULE) for _ in range(2)]


@case("free.while_mapped")
def _(d: Driver) -> Any:
    _, address = mapped(d)
    return [d.code(name, address, GRANULE) for name in ("cuMemAddressFree", "cuMemUnmap", "cuMemAddressFree")]


@case("map.unreserved_va")
def _(d: Driver) -> Any:
    return d.code("cuMemMap", WILD, GRANULE, 0, created(d), 0)


@case("map.null_va")
def _(d: Driver) -> Any:
    return d.code("cuMemMap", 0, GRANULE, 0, created(d), 0)


@case("map.larger_than_handle")
def _(d: Driver) -> Any:
    return d.code("cuMemMap", reserved(d, 2), 2 * GRANULE, 0, created(d), 0)


@case("map.smaller_than_handle")
def _(d: Driver) -> Any:
    return d.code("cuMemMap", reserved(d, 2), GRANULE, 0, created(d, 2), 0)


@case("map.nonzero_offset")
def _(d: Driver) -> Any:
    return d.code("cuMemMap", reserved(d, 2), GRANULE, GRANULE, created(d, 2), 0)


@case("map.twice_same_va")
def _(d: Driver) -> Any:
    handle, address = created(d), reserved(d)
    return [d.code("cuMemMap", address, GRANULE, 0, handle, 0) for _ in range(2)]


@case("map.same_handle_two_vas")
def _(d: Driver) -> Any:
    handle, address = created(d), reserved(d, 2)
    return [d.code("cuMemMap", address + i * GRANULE, GRANULE, 0, handle, 0) for i in range(2)]


@case("unmap.two_mappings_in_one_call")
def _(d: Driver) -> Any:
    handle, address = mapped(d, room=2)
    d.value("cuMemMap", address + GRANULE, GRANULE, 0, handle, 0)
    return [d.code("cuMemUnmap", address, 2 * GRANULE)]


@case("unmap.not_mapped")
def _(d: Driver) -> Any:
    return d.code("cuMemUnmap", reserved(d), GRANULE)


@case("unmap.partial")
def _(d: Driver) -> Any:
    _, address = mapped(d, 2, 2)
    return [d.code("cuMemUnmap", address, size * GRANULE) for size in (1, 2)]


@case("access.before_map")
def _(d: Driver) -> Any:
    return d.code("cuMemSetAccess", reserved(d), GRANULE, [access()], 1)


@case("access.partially_mapped")
def _(d: Driver) -> Any:
    _, address = mapped(d, room=2)
    return d.code("cuMemSetAccess", address, 2 * GRANULE, [access()], 1)


@case("access.bad_device")
def _(d: Driver) -> Any:
    _, address = mapped(d)
    return d.code("cuMemSetAccess", address, GRANULE, [access(99)], 1)


@case("memcpy.mapped_no_access")
def _(d: Driver) -> Any:
    _, address = mapped(d)
    return d.code("cuMemcpyHtoD", address, ctypes.addressof(HOST), 64)


@case("memcpy.ok_then_release_before_unmap")
def _(d: Driver) -> Any:
    handle, address = created(d), reserved(d)
    copy = ("cuMemcpyHtoD", address, ctypes.addressof(HOST), 64)
    return [
        d.code("cuMemMap", address, GRANULE, 0, handle, 0),
        d.code("cuMemSetAccess", address, GRANULE, [access()], 1),
        d.code(*copy),
        d.code("cuMemRelease", handle),
        d.code(*copy),
        d.code("cuMemUnmap", address, GRANULE),
        d.code("cuMemAddressFree", address, GRANULE),
    ]


@case("memset.past_end_of_mapping")
def _(d: Driver) -> Any:
    _, address = mapped(d)
    d.value("cuMemSetAccess", address, GRANULE, [access()], 1)
    return d.code("cuMemsetD8", address, 0, 2 * GRANULE)


@case("memsetD32.unaligned_dst")
def _(d: Driver) -> Any:
    return d.code("cuMemsetD32", int(d.value("cuMemAlloc", 64)) + 2, 0, 4)


@case("memfree.twice")
def _(d: Driver) -> Any:
    pointer = d.value("cuMemAlloc", 64)
    return [d.code("cuMemFree", pointer) for _ in range(2)]


@case("memfree.vmm_pointer")
def _(d: Driver) -> Any:
    _, address = mapped(d)
    return d.code("cuMemFree", address)


@case("memory_is_freed_only_when_last_reference_goes")
def _(d: Driver) -> Any:
    size = 64 * GRANULE
    before = d.machine.device_bytes()
    handle = created(d, 64)
    told = {"created": d.machine.device_bytes() - before}
    address = reserved(d, 64)
    d.value("cuMemMap", address, size, 0, handle, 0)
    fd = d.value("cuMemExportToShareableHandle", handle, POSIX, 0)
    d.value("cuMemRelease", handle)
    told["after_release_still_mapped"] = d.machine.device_bytes() - before
    d.value("cuMemUnmap", address, size)
    told["after_unmap_fd_open"] = d.machine.device_bytes() - before
    os.close(fd)
    told["after_fd_closed"] = d.machine.device_bytes() - before
    return {**told, "size": size}


def test_every_recorded_case_is_here() -> None:
    assert set(CASES) == set(RECORDED)
    assert len(RECORDED) == 51


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_the_answer_is_the_recorded_one(name: str, driver: Driver) -> None:
    assert CASES[name](driver) == RECORDED[name]["result"]
    assert driver.code("cuCtxSynchronize") == RECORDED[name]["ctx_after"]


@pytest.mark.parametrize("name", DEADLY)
def test_the_process_dies_where_the_real_one_died(name: str, driver: Driver) -> None:
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        if name == "export.after_release":
            handle = created(driver)
            driver.cuMemRelease(handle)
            driver.cuMemExportToShareableHandle(handle, POSIX, 0)
        else:
            driver.cuMemMap(reserved(driver), GRANULE, 0, 0x123456, 0)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGSEGV


@pytest.mark.parametrize("key", sorted(key for key in VECTORS if key.startswith("attr.")))
def test_an_attribute_is_the_recorded_one(key: str, driver: Driver) -> None:
    from cuda.bindings import driver as cuda

    attribute = getattr(cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{key.removeprefix('attr.')}")
    assert driver.value("cuDeviceGetAttribute", attribute, 0) == VECTORS[key]


@pytest.mark.parametrize("key", sorted(key for key in VECTORS if key.startswith("p2p.")))
def test_a_peer_attribute_is_the_recorded_one(key: str, driver: Driver) -> None:
    from cuda.bindings import driver as cuda

    attribute = getattr(cuda.CUdevice_P2PAttribute, key.removeprefix("p2p."))
    assert driver.value("cuDeviceGetP2PAttribute", attribute, 0, 1) == VECTORS[key]


def test_what_else_is_recorded_of_the_machine(driver: Driver) -> None:
    told = {
        "driver_version": driver.value("cuDriverGetVersion"),
        "devices": driver.value("cuDeviceGetCount"),
        "can_access_peer.0->1": driver.value("cuDeviceCanAccessPeer", 0, 1),
        "granularity.min": driver.value("cuMemGetAllocationGranularity", memory_prop(), 0),
        "granularity.recommended": driver.value("cuMemGetAllocationGranularity", memory_prop(), 1),
    }
    assert told == {key: VECTORS[key] for key in told}


#: A store to each of these was recorded: the mode, and a pointer like it.
STORES: dict[str, Callable[[int], int]] = {
    "null": lambda good: 0,
    "wild": lambda good: WILD,
    "misaligned": lambda good: good + 1,
}


@pytest.mark.parametrize("mode", sorted(STORES))
def test_a_kernel_that_stores_wildly_poisons_as_recorded(mode: str, driver: Driver) -> None:
    _, address = mapped(driver)
    driver.value("cuMemSetAccess", address, GRANULE, [access()], 1)
    pointer = driver.value("cuMemAlloc", 64)
    driver.machine.call("kernel.lamport_initialize", STORES[mode](address), 4, torch.float32)
    calls: dict[str, tuple[str, tuple[Any, ...]]] = {
        "cuCtxSynchronize": ("cuCtxSynchronize", ()),
        "cuCtxSynchronize again": ("cuCtxSynchronize", ()),
        "cuMemAlloc": ("cuMemAlloc", (64,)),
        # So the recorder labels it; it calls cuMemGetInfo.
        "cuMemCreate granularity": ("cuMemGetInfo", ()),
        "cuDeviceGetAttribute": ("cuDeviceGetAttribute", (132, 0)),
        "cuCtxGetCurrent": ("cuCtxGetCurrent", ()),
        "cuMemFree": ("cuMemFree", (pointer,)),
        "cuMemAddressReserve": ("cuMemAddressReserve", (GRANULE, GRANULE, 0, 0)),
    }
    prefix = f"ima {mode} "
    lines = (DATA / "illegal_address.txt").read_text().splitlines()
    recorded = dict(line.removeprefix(prefix).rsplit(" ", 1) for line in lines if line.startswith(prefix))
    assert {name: driver.code(site, *args) for name, (site, args) in calls.items()} == recorded


def _lines(prefix: str) -> list[tuple[str, str]]:
    lines = (DATA / "cross_process_sticky_capture_nvml.txt").read_text().splitlines()
    pairs = [line.split(" = ", 1) for line in lines if line.startswith(prefix)]
    return [(key, value) for key, value in pairs]


def test_import_and_lifetime_across_processes_are_the_recorded_ones() -> None:
    board, (first, second) = pair()
    size = 32 * GRANULE
    handle, address = mapped(first, 32, 32)
    first.value("cuMemSetAccess", address, size, [access(0)], 1)
    first.value("cuMemsetD32", address, 0x12345678, size // 4)
    fd = first.value("cuMemExportToShareableHandle", handle, POSIX, 0)

    imported = second.cuMemImportFromShareableHandle(fd, POSIX)
    answers = {"import": imported[0].name}
    answers["reexport_of_import"] = second.code("cuMemExportToShareableHandle", imported[1], POSIX, 0)
    answers["import_twice"] = second.code("cuMemImportFromShareableHandle", fd, POSIX)
    os.close(fd)
    there = reserved(second, 32)
    answers["map"] = second.code("cuMemMap", there, size, 0, imported[1], 0)
    answers["access_from_peer"] = second.code("cuMemSetAccess", there, size, [access(1)], 1)
    answers["read"] = _read(second, there)
    first.value("cuMemUnmap", address, size)
    first.value("cuMemRelease", handle)
    answers["read_after_exporter_freed"] = _read(second, there)
    board.forget(0)
    answers["read_after_exporter_exit"] = _read(second, there)
    answers["unmap"] = second.code("cuMemUnmap", there, size)
    answers["release"] = second.code("cuMemRelease", imported[1])
    assert answers == {key.removeprefix("xproc."): value for key, value in _lines("xproc.")}
    board.close()


def _read(driver: Driver, address: int) -> str:
    words = (ctypes.c_uint32 * 4)()
    answer = driver.code("cuMemcpyDtoH", ctypes.addressof(words), address, 16)
    return str([answer, [hex(word) for word in words]])


def test_a_poisoned_context_answers_as_recorded(driver: Driver) -> None:
    handle, address = mapped(driver)
    driver.value("cuMemSetAccess", address, GRANULE, [access()], 1)
    fd = driver.value("cuMemExportToShareableHandle", handle, POSIX, 0)
    driver.machine.poison("CUDA_ERROR_ILLEGAL_ADDRESS")
    arguments: dict[str, tuple[Any, ...]] = {
        "cuMemcpyHtoD": (address, ctypes.addressof(HOST), 16),
        "cuDeviceGet": (0,),
        "cuCtxSetCurrent": (driver.value("cuCtxGetCurrent"),),
        "cuDevicePrimaryCtxRetain": (0,),
        "cuMemGetAllocationGranularity": (memory_prop(), 1),
        "cuMemCreate": (GRANULE, memory_prop(), 0),
        "cuMemExportToShareableHandle": (handle, POSIX, 0),
        "cuMemImportFromShareableHandle": (fd, POSIX),
        "cuMemAddressReserve": (GRANULE, GRANULE, 0, 0),
        "cuMemSetAccess": (address, GRANULE, [access()], 1),
        "cuMemsetD8": (address, 0, 16),
        "cuMemUnmap": (address, GRANULE),
        "cuMemAddressFree": (address, GRANULE),
        "cuMemRelease": (handle,),
        "cuMemAlloc": (16,),
    }
    full = {"cuMemExport": "cuMemExportToShareableHandle", "cuMemImport": "cuMemImportFromShareableHandle"}
    for key, recorded in _lines("sticky700."):
        name = key.removeprefix("sticky700.")
        site = full.get(name, name)
        assert driver.code(site, *arguments.get(site, ())) == recorded, site


@pytest.mark.parametrize("mode", ["GLOBAL", "THREAD_LOCAL", "RELAXED"])
def test_a_capturing_stream_refuses_what_it_refused(mode: str, driver: Driver) -> None:
    handle, address = mapped(driver)
    driver.value("cuMemSetAccess", address, GRANULE, [access()], 1)
    arguments: dict[str, tuple[Any, ...]] = {
        "cuMemCreate": (GRANULE, memory_prop(), 0),
        "cuMemAddressReserve": (GRANULE, GRANULE, 0, 0),
        "cuMemMap": (reserved(driver), GRANULE, 0, handle, 0),
        "cuMemSetAccess": (address, GRANULE, [access()], 1),
        "cuMemExport": (handle, POSIX, 0),
        "cuMemAlloc": (64,),
        "cuCtxSynchronize": (),
        "cuMemsetD8": (address, 0, 16),
        "cuMemUnmap": (address, GRANULE),
        "cuMemAddressFree": (address, GRANULE),
        "cuMemRelease": (handle,),
        "cuDeviceGetAttribute": (132, 0),
    }
    for key, recorded in _lines(f"capture.{mode}."):
        name = key.rsplit(".", 1)[-1]
        driver.machine.begin_capture(mode.lower().replace("_", "-"))
        site = {"cuMemExport": "cuMemExportToShareableHandle"}.get(name, name)
        answer = driver.code(site, *arguments[name])
        end = driver.machine.end_capture() or "CUDA_SUCCESS"
        assert str([answer, end]) == recorded, name
