"""The driver and the runtime beyond the recording: contexts, access, copies, the ledger.

What the real driver answered is in test_machine_conformance.py.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pynvml
import pytest
from cuda.bindings import driver as cuda

from faultlab.codes import CUDA
from faultlab.errors import UnknownCall
from faultlab.machine.board import Board, WouldBlock
from faultlab.machine.simulated.answers import DRIVER
from faultlab.sites import SITES
from faultlab.topology.models import Does, Links, Topology
from tests.unit.machines import (
    FABRIC,
    GRANULE,
    POSIX,
    Driver,
    access,
    memory_prop,
    pair,
    recorded_topology,
    team_prop,
)

OK = "CUDA_SUCCESS"
INVALID = "CUDA_ERROR_INVALID_VALUE"


@pytest.fixture
def drivers() -> Iterator[list[Driver]]:
    board, made = pair()
    yield made
    board.close()


@pytest.fixture
def driver(drivers: list[Driver]) -> Driver:
    return drivers[0]


def on(topology: Topology, ranks: int = 2) -> list[Driver]:
    board = Board(topology, list(range(ranks)))
    return [Driver(board, rank, topology, ranks) for rank in range(ranks)]


def mapped(d: Driver, granules: int = 1, device: int = 0) -> tuple[Any, int]:
    """Memory of a device, mapped and not yet accessible."""
    size = granules * GRANULE
    handle = d.value("cuMemCreate", size, memory_prop(device), 0)
    address = int(d.value("cuMemAddressReserve", size, GRANULE, 0, 0))
    d.value("cuMemMap", address, size, 0, handle, 0)
    return handle, address


def ready(d: Driver, granules: int = 1) -> int:
    """The address of memory that can be used."""
    _, address = mapped(d, granules)
    d.value("cuMemSetAccess", address, granules * GRANULE, [access(0)], 1)
    return address


def read(d: Driver, address: int, size: int) -> bytes:
    found = (ctypes.c_ubyte * size)()
    d.value("cuMemcpyDtoH", ctypes.addressof(found), address, size)
    return bytes(found)


def in_thread(body: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(body()))
    thread.start()
    thread.join()
    return found[0]


# ---------------------------------------------------------------- interface


@pytest.mark.parametrize("site", sorted(DRIVER))
def test_arguments_have_the_names_of_the_binding(site: str) -> None:
    ours = list(inspect.signature(DRIVER[site]).parameters)[1:]
    assert ours == list(inspect.signature(getattr(cuda, site)).parameters)


@pytest.mark.parametrize("site", sorted(DRIVER))
def test_a_refused_call_answers_like_the_binding(site: str) -> None:
    code = SITES[site].errors[0]
    does = Does(multicast=True, refuses={site: code})
    (d, _) = on(recorded_topology())
    d.machine.topology = d.machine.topology.model_copy(update={"does": does})
    answer = d.machine.call(site)
    assert answer[0] == cuda.CUresult(CUDA[code])
    assert answer[1:] == (None,) * SITES[site].outputs


def test_a_refused_runtime_or_nvml_call_answers_in_its_own_way() -> None:
    refuses = {"cudart.cudaMalloc": "CUDA_ERROR_OUT_OF_MEMORY", "nvmlInit": "NVML_ERROR_NO_PERMISSION"}
    topology = recorded_topology().model_copy(update={"does": Does(multicast=True, refuses=refuses)})
    d, _ = on(topology)
    assert d.machine.call("cudart.cudaMalloc", 64) == (2, None)
    with pytest.raises(pynvml.NVMLError_NoPermission):
        d.machine.call("nvmlInit")


def test_an_unknown_site_attribute_or_offset_is_an_unknown_call(driver: Driver) -> None:
    with pytest.raises(UnknownCall, match="cuStreamCreate"):
        driver.machine.call("cuStreamCreate", 0)
    with pytest.raises(UnknownCall, match="WARP_SIZE"):
        driver.cuDeviceGetAttribute(cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_WARP_SIZE, 0)
    team = driver.value("cuMulticastCreate", team_prop(1, 2 * GRANULE))
    driver.value("cuMulticastAddDevice", team, 0)
    own = driver.value("cuMemCreate", GRANULE, memory_prop(), 0)
    with pytest.raises(UnknownCall, match="offset"):
        driver.cuMulticastBindMem(team, GRANULE, own, 0, GRANULE, 0)
    assert driver.code("cuDeviceGetAttribute", 99999, 0) == INVALID


def test_handles_are_truthy_wrappers_and_descriptors_plain_numbers(driver: Driver) -> None:
    handle = driver.value("cuMemCreate", GRANULE, memory_prop(), 0)
    assert isinstance(handle, cuda.CUmemGenericAllocationHandle)
    assert handle
    pointer = driver.value("cuMemAddressReserve", GRANULE, 0, 0, 0)
    assert isinstance(pointer, cuda.CUdeviceptr)
    fd = driver.value("cuMemExportToShareableHandle", handle, POSIX, 0)
    assert type(fd) is int
    assert not os.get_inheritable(fd)
    os.close(fd)


# ------------------------------------------------------------------ context


def test_a_context_belongs_to_the_thread_that_set_it(driver: Driver) -> None:
    def elsewhere() -> list[Any]:
        m = driver.machine
        return [
            int(m.call("cuCtxGetCurrent")[1]),
            *[m.call(site, *args)[0].name for site, args in NEED_A_CONTEXT.items()],
        ]

    assert in_thread(elsewhere) == [0, *["CUDA_ERROR_INVALID_CONTEXT"] * len(NEED_A_CONTEXT)]
    assert int(driver.value("cuCtxGetCurrent")) != 0
    assert int(driver.value("cuCtxGetDevice")) == 0


NEED_A_CONTEXT: dict[str, tuple[Any, ...]] = {
    "cuCtxGetDevice": (),
    "cuCtxSynchronize": (),
    "cuMemGetInfo": (),
    "cuMemAlloc": (64,),
    "cuMemFree": (0,),
    "cuMemsetD8": (0, 0, 1),
    "cuMemcpyHtoD": (0, b"x", 1),
}


def test_a_runtime_call_makes_the_ranks_own_context_current(drivers: list[Driver]) -> None:
    m = drivers[1].machine

    def elsewhere() -> tuple[int, int]:
        code, _ = m.call("cudart.cudaDeviceSynchronize")
        return code, int(m.call("cuCtxGetDevice")[1])

    assert in_thread(elsewhere) == (0, 1)


def test_no_context_is_current_after_a_null_one_was_set(driver: Driver) -> None:
    driver.value("cuCtxSetCurrent", cuda.CUcontext(0))
    assert driver.code("cuMemAlloc", 64) == "CUDA_ERROR_INVALID_CONTEXT"
    assert driver.code("cuMemCreate", GRANULE, memory_prop(), 0) == OK, "memory objects need none"
    assert driver.code("cuCtxSetCurrent", cuda.CUcontext(0x1234)) == "CUDA_ERROR_INVALID_CONTEXT"


def test_memory_is_charged_to_the_current_device(drivers: list[Driver]) -> None:
    m = drivers[0].machine
    assert m.call("cudart.cudaSetDevice", 1) == (0, None)
    code, address = m.call("cudart.cudaMalloc", 4096)
    assert code == 0
    assert (m.bytes_in_use(0), m.bytes_in_use(1)) == (0, 4096)
    total = 139 << 30
    assert drivers[0].cuMemGetInfo()[1:] == (total - 4096, total)
    m.call("cudart.cudaSetDevice", 0)
    assert drivers[0].cuMemGetInfo()[1:] == (total, total)
    assert m.call("cudart.cudaFree", address) == (0, None), "from whichever device"
    assert m.call("cudart.cudaSetDevice", 2) == (101, None)


# ------------------------------------------------------------------- access


def test_there_is_no_access_without_a_path_between_the_gpus() -> None:
    islands = Links(kind="bridge", islands=[[0, 1], [2, 3]], pcie_p2p=False)
    d = on(recorded_topology(4).model_copy(update={"links": islands}), 4)[0]
    assert d.value("cuDeviceCanAccessPeer", 0, 1) == 1
    assert d.value("cuDeviceCanAccessPeer", 0, 2) == 0
    near, far = mapped(d, device=1)[1], mapped(d, device=2)[1]
    assert d.code("cuMemSetAccess", near, GRANULE, [access(0)], 1) == OK
    assert d.code("cuMemSetAccess", far, GRANULE, [access(0)], 1) == "CUDA_ERROR_INVALID_DEVICE"


def test_whose_memory_it_is_is_known_after_its_handle_is_released() -> None:
    apart = Links(kind="pcie", pcie_p2p=False)
    d, _ = on(recorded_topology().model_copy(update={"links": apart}))
    handle, address = mapped(d, device=1)
    d.value("cuMemRelease", handle)
    assert d.code("cuMemSetAccess", address, GRANULE, [access(0)], 1) == "CUDA_ERROR_INVALID_DEVICE"


def test_access_is_the_devices_that_was_given_it_and_can_be_taken_back(driver: Driver) -> None:
    _, address = mapped(driver)
    driver.value("cuMemSetAccess", address, GRANULE, [access(1)], 1)
    assert driver.code("cuMemsetD8", address, 1, 4) == INVALID, "device 1 may, device 0 is current"
    driver.value("cuMemSetAccess", address, GRANULE, [access(0)], 1)
    assert driver.code("cuMemsetD8", address, 1, 4) == OK
    reader, nobody = access(0), access(0)
    reader.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    nobody.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE
    driver.value("cuMemSetAccess", address, GRANULE, [reader], 1)
    assert driver.code("cuMemsetD8", address, 2, 4) == INVALID
    assert read(driver, address, 4) == bytes([1] * 4)
    driver.value("cuMemSetAccess", address, GRANULE, [nobody], 1)
    assert driver.machine.view(address, 4) is None


def test_access_goes_with_the_mapping(driver: Driver) -> None:
    handle, address = mapped(driver)
    driver.value("cuMemSetAccess", address, GRANULE, [access(0)], 1)
    driver.value("cuMemsetD8", address, 9, 4)
    driver.value("cuMemUnmap", address, GRANULE)
    assert driver.machine.view(address, 4) is None
    driver.value("cuMemMap", address, GRANULE, 0, handle, 0)
    assert driver.machine.view(address, 4) is None
    driver.value("cuMemSetAccess", address, GRANULE, [access(0)], 1)
    assert read(driver, address, 4) == bytes([9] * 4), "the same memory at the same address"


# --------------------------------------------------------- copies and fills


@pytest.mark.parametrize(
    ("site", "value", "expected"),
    [
        ("cuMemsetD8", 0xAB, b"\xab" * 12),
        ("cuMemsetD16", 0x8000, b"\x00\x80" * 6),
        ("cuMemsetD32", 0x80000000, b"\x00\x00\x00\x80" * 3),
        ("cuMemsetD32", 0x12345678, b"\x78\x56\x34\x12" * 3),
        ("cuMemsetD8", 0x1FF, b"\xff" * 12),
    ],
)
def test_a_fill_writes_the_value_and_nothing_beside(
    site: str, value: int, expected: bytes, driver: Driver
) -> None:
    address = ready(driver)
    width = {"cuMemsetD8": 1, "cuMemsetD16": 2, "cuMemsetD32": 4}[site]
    driver.value(site, address + 4, value, 12 // width)
    assert read(driver, address, 20) == bytes(4) + expected + bytes(4)


def test_a_fill_and_a_copy_run_over_adjacent_mappings(driver: Driver) -> None:
    handles = [driver.value("cuMemCreate", GRANULE, memory_prop(), 0) for _ in range(2)]
    address = int(driver.value("cuMemAddressReserve", 2 * GRANULE, 0, 0, 0))
    for index, handle in enumerate(handles):
        driver.value("cuMemMap", address + index * GRANULE, GRANULE, 0, handle, 0)
    driver.value("cuMemSetAccess", address, 2 * GRANULE, [access(0)], 1)
    middle = address + GRANULE - 4
    driver.value("cuMemsetD32", middle, 7, 2)
    assert read(driver, middle, 8) == b"\x07\0\0\0" * 2
    driver.value("cuMemcpyHtoD", middle, b"abcdefgh", 8)
    assert read(driver, middle, 8) == b"abcdefgh"


def test_nothing_is_copied_or_filled_for_a_count_of_zero(driver: Driver) -> None:
    address = ready(driver)
    assert driver.code("cuMemsetD32", address, 1, 0) == OK
    assert driver.code("cuMemcpyHtoD", address, b"", 0) == OK


@pytest.mark.parametrize("host", [0, 8])
def test_a_null_host_pointer_is_refused_and_not_followed(host: int, driver: Driver) -> None:
    address = ready(driver)
    assert driver.code("cuMemcpyHtoD", address, host, 4) == INVALID
    assert driver.code("cuMemcpyDtoH", host, address, 4) == INVALID


def test_the_runtime_copies_whichever_way_the_addresses_say(driver: Driver) -> None:
    m, address = driver.machine, ready(driver)
    source, target = ctypes.create_string_buffer(b"0123456789", 10), ctypes.create_string_buffer(10)
    (_, private) = m.call("cudart.cudaMalloc", 20)
    steps = [(address, ctypes.addressof(source)), (private, address), (ctypes.addressof(target), private)]
    for to, of in steps:
        assert m.call("cudart.cudaMemcpy", to, of, 10, 4) == (0, None)
    assert target.raw == source.raw
    assert m.call("cudart.cudaMemcpy", private + 15, address, 10, 4) == (1, None), "past its end"
    assert m.call("cudart.cudaMemcpy", address, 0, 10, 4) == (1, None)
    assert m.call("cudart.cudaMemset", private, 0, 20) == (0, None)
    assert m.call("cudart.cudaMemset", private, 0, 21) == (1, None)


def test_a_poisoned_context_fails_the_runtime_too(driver: Driver) -> None:
    m = driver.machine
    _, private = m.call("cudart.cudaMalloc", 20)
    m.poison("CUDA_ERROR_MISALIGNED_ADDRESS")
    m.poison("CUDA_ERROR_ILLEGAL_ADDRESS")
    assert m.context_error() == "CUDA_ERROR_MISALIGNED_ADDRESS", "the first one stays"
    for site, args in {
        "cudaDeviceSynchronize": (),
        "cudaMalloc": (4,),
        "cudaFree": (private,),
        "cudaMemset": (private, 0, 4),
        "cudaMemcpy": (private, private, 4, 4),
    }.items():
        assert m.call(f"cudart.{site}", *args) == (716, None), site
    assert driver.code("cuMemFree", 0) == "CUDA_ERROR_MISALIGNED_ADDRESS"


# ------------------------------------------------------------------ capture


def test_a_thread_local_capture_minds_the_allocations_of_its_own_thread(driver: Driver) -> None:
    m = driver.machine

    def malloc_elsewhere() -> int:
        return int(m.call("cudart.cudaMalloc", 64)[0])

    m.begin_capture("thread-local")
    assert m.capturing()
    assert in_thread(malloc_elsewhere) == 0
    assert m.end_capture() == ""
    m.begin_capture("global")
    assert in_thread(malloc_elsewhere) == 900
    assert m.end_capture() == "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
    assert not m.capturing()


def test_memory_is_not_freed_in_a_strict_capture(driver: Driver) -> None:
    pointer = driver.value("cuMemAlloc", 64)
    driver.machine.begin_capture("global")
    assert driver.code("cuMemFree", pointer) == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
    driver.machine.end_capture()
    assert driver.code("cuMemFree", pointer) == OK


# ----------------------------------------------------------- fabric handles


def test_fabric_handles_share_memory_where_they_work() -> None:
    does = Does(multicast=True, fabric_handles="works")
    first, second = on(recorded_topology().model_copy(update={"does": does}))
    handle = first.value("cuMemCreate", GRANULE, memory_prop(types=FABRIC), 0)
    made = first.value("cuMemExportToShareableHandle", handle, FABRIC, 0)
    assert isinstance(made, cuda.CUmemFabricHandle)
    assert len(made.data) == 64
    for given in (made, bytes(made.data)):
        imported = second.value("cuMemImportFromShareableHandle", given, FABRIC)
        assert second.code("cuMemRelease", imported) == OK
    first.value("cuMemRelease", handle)
    gone = second.code("cuMemImportFromShareableHandle", made, FABRIC)
    assert gone == "CUDA_ERROR_INVALID_HANDLE"
    foreign = second.code("cuMemImportFromShareableHandle", bytes(64), FABRIC)
    assert foreign == "CUDA_ERROR_INVALID_HANDLE"


def test_a_multicast_object_is_not_exported_over_a_fabric_that_refuses(driver: Driver) -> None:
    prop = team_prop(2)
    prop.handleTypes = int(FABRIC)
    team = driver.value("cuMulticastCreate", prop)
    assert driver.code("cuMemExportToShareableHandle", team, FABRIC, 0) == "CUDA_ERROR_NOT_PERMITTED"
    assert driver.code("cuMemExportToShareableHandle", team, POSIX, 0) == INVALID


# ---------------------------------------------------------------- multicast


@pytest.mark.parametrize(
    ("size", "devices", "code"),
    [(GRANULE, 0, INVALID), (0, 2, INVALID), (GRANULE + 1, 2, INVALID), (GRANULE, 2, OK)],
)
def test_what_a_multicast_object_may_be(size: int, devices: int, code: str, driver: Driver) -> None:
    assert driver.code("cuMulticastCreate", team_prop(devices, size)) == code


def test_a_machine_without_multicast_refuses_the_object_or_lies_until_the_device_is_added() -> None:
    plain = recorded_topology().model_copy(update={"does": Does(multicast=False)})
    d, _ = on(plain)
    assert d.code("cuMulticastCreate", team_prop(2)) == "CUDA_ERROR_NOT_SUPPORTED"
    lies = Does(multicast=False, refuses={"cuMulticastAddDevice": "CUDA_ERROR_NOT_SUPPORTED"})
    d, _ = on(plain.model_copy(update={"does": lies}))
    team = d.value("cuMulticastCreate", team_prop(2))
    assert d.code("cuMulticastAddDevice", team, 0) == "CUDA_ERROR_NOT_SUPPORTED"


def test_map_and_bind_block_until_the_last_device_is_added(drivers: list[Driver]) -> None:
    first, second = drivers
    team = first.value("cuMulticastCreate", team_prop(2))
    fd = first.value("cuMemExportToShareableHandle", team, POSIX, 0)
    other = second.value("cuMemImportFromShareableHandle", fd, POSIX)
    os.close(fd)
    own = first.value("cuMemCreate", GRANULE, memory_prop(), 0)
    address = int(first.value("cuMemAddressReserve", GRANULE, GRANULE, 0, 0))
    first.value("cuMulticastAddDevice", team, 0)
    with pytest.raises(WouldBlock):
        first.cuMemMap(address, GRANULE, 0, team, 0)
    with pytest.raises(WouldBlock):
        first.cuMulticastBindMem(team, 0, own, 0, GRANULE, 0)
    assert [each.kind for each in first.machine.ledger()] == ["handle", "handle", "range"]
    second.value("cuMulticastAddDevice", other, 1)
    assert first.code("cuMemMap", address, GRANULE, 0, team, 0) == OK
    assert first.code("cuMulticastBindMem", team, 0, own, 0, GRANULE, 0) == OK
    assert first.code("cuMulticastUnbind", team, 0, 0, 2 * GRANULE) == INVALID, "another size"
    assert first.code("cuMulticastUnbind", team, 0, 0, GRANULE) == OK


# ------------------------------------------------------------------- ledger


def test_the_ledger_follows_a_life_from_create_to_free(driver: Driver) -> None:
    m = driver.machine
    handle = driver.value("cuMemCreate", GRANULE, memory_prop(), 0)
    (h,) = m.touched().made
    address = int(driver.value("cuMemAddressReserve", GRANULE, GRANULE, 0, 0))
    (r,) = m.touched().made
    driver.value("cuMemMap", address, GRANULE, 0, handle, 0)
    (mapping,) = m.touched().made
    assert mapping.depends_on == (r.id, h.id)
    pointer = driver.value("cuMemAlloc", 100)
    (a,) = m.touched().made
    assert [each.kind for each in m.ledger()] == ["handle", "range", "mapping", "allocation"]
    assert a.size_bytes == 100
    assert m.refers_to("cuMemRelease", (handle,)) == [h.id]
    assert m.refers_to("cuMemUnmap", (address, GRANULE)) == [mapping.id]
    assert m.refers_to("cuMemAddressFree", (address, GRANULE)) == [r.id]
    assert m.refers_to("cuMemFree", (pointer,)) == m.refers_to("cudart.cudaFree", (int(pointer),)) == [a.id]
    for site, args, gone in (
        ("cuMemRelease", (handle,), h),
        ("cuMemUnmap", (address, GRANULE), mapping),
        ("cuMemAddressFree", (address, GRANULE), r),
        ("cuMemFree", (pointer,), a),
    ):
        driver.value(site, *args)
        assert m.touched().released == [gone.id]
    assert m.ledger() == []
    assert m.device_bytes() == 0


def test_a_failed_call_touches_nothing(driver: Driver) -> None:
    for site, args in (
        ("cuMemAddressReserve", (0, 0, 0, 0)),
        ("cuMemAlloc", (1 << 42,)),
        ("cuMemCreate", (1 << 40, memory_prop(), 0)),
        ("cuMemRelease", (0,)),
        ("cuMemUnmap", (0, GRANULE)),
    ):
        assert driver.code(site, *args) != OK
        touched = driver.machine.touched()
        assert (touched.made, touched.released) == ([], []), site
    assert driver.machine.ledger() == []


def test_what_a_call_touched_is_told_to_its_own_thread(driver: Driver) -> None:
    driver.value("cuMemCreate", GRANULE, memory_prop(), 0)
    assert in_thread(lambda: driver.machine.touched().made) == []
    assert len(driver.machine.touched().made) == 1
    driver.value("cuDeviceGet", 0)
    assert driver.machine.touched().made == []


def test_what_a_call_touched_is_told_once(driver: Driver) -> None:
    driver.value("cuMemCreate", GRANULE, memory_prop(), 0)
    assert len(driver.machine.touched().made) == 1
    assert driver.machine.touched().made == []


def test_a_binding_is_in_the_ledger_and_goes_with_the_last_reference(driver: Driver) -> None:
    m = driver.machine
    team = driver.value("cuMulticastCreate", team_prop(1))
    driver.value("cuMulticastAddDevice", team, 0)
    own = driver.value("cuMemCreate", GRANULE, memory_prop(), 0)
    driver.value("cuMulticastBindMem", team, 0, own, 0, GRANULE, 0)
    (binding,) = m.touched().made
    assert binding.kind == "binding"
    assert m.refers_to("cuMulticastUnbind", (team, 0, 0, GRANULE)) == [binding.id]
    driver.value("cuMemRelease", own)
    assert m.device_bytes() == GRANULE, "the binding keeps the memory"
    driver.value("cuMemRelease", team)
    assert binding.id in m.touched().released
    assert m.ledger() == []
    assert m.device_bytes() == 0


def test_closing_survives_a_tensor_that_still_looks(driver: Driver) -> None:
    view = driver.machine.view(ready(driver), 16)
    assert view is not None
    driver.machine.close()
    view[0] = 5
    assert view[0] == 5


def test_a_stand_in_is_no_memory_of_the_driver(driver: Driver) -> None:
    m = driver.machine
    address = m.make_standin("key", 2, 5000)
    (made,) = m.touched().made
    assert (made.kind, made.size_bytes) == ("standin", 8192)
    assert m.view(address, 8192) is not None
    assert driver.code("cuMemFree", address) == INVALID
    assert driver.code("cuMemUnmap", address, 8192) == INVALID
    assert driver.code("cuMemAddressFree", address, 8192) == INVALID
    m.release_standin(address)
    assert m.touched().released == [made.id]
    assert m.ledger() == []
    assert m.view(address, 1) is None
