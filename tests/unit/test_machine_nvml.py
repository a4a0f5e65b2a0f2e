"""NVML on a simulated machine: what was recorded, and what the documentation says."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pynvml
import pytest

from faultlab.machine.board import Board, LocalBoard
from faultlab.machine.simulated.machine import SimulatedMachine
from faultlab.topology.models import Does, Fabric, Links, Says, Topology
from tests.unit.machines import recorded_topology

DATA = Path(__file__).resolve().parent.parent / "data" / "h200"
LINES = (DATA / "cross_process_sticky_capture_nvml.txt").read_text().splitlines()
RECORDED = dict(line.split(" = ", 1) for line in LINES if line.startswith("nvml."))


def machine_of(topology: Topology, rank: int = 0) -> SimulatedMachine:
    gpus = list(range(topology.gpu_count))
    return SimulatedMachine(topology, rank, gpus, LocalBoard(Board(topology, gpus), rank))


@pytest.fixture
def machine() -> SimulatedMachine:
    made = machine_of(recorded_topology())
    made.call("nvmlInit")
    return made


def code_of(machine: SimulatedMachine, site: str, *args: Any) -> int:
    """The error that a call raises, 0 if it raises none."""
    try:
        machine.call(site, *args)
    except pynvml.NVMLError as error:
        return int(error.value)
    return 0


def said(machine: SimulatedMachine, **says: Any) -> SimulatedMachine:
    """The same machine, whose probes say something else."""
    topology = machine.topology
    changed = machine_of(topology.model_copy(update={"says": topology.says.model_copy(update=says)}))
    changed.call("nvmlInit")
    return changed


# ----------------------------------------------------------------- recorded


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("by_reference", [True, False])
def test_the_fabric_answer_is_the_recorded_one(
    index: int, by_reference: bool, machine: SimulatedMachine
) -> None:
    device = machine.call("nvmlDeviceGetHandleByIndex", index)
    info = pynvml.c_nvmlGpuFabricInfoV_t()
    given = ctypes.byref(info) if by_reference else info
    assert machine.call("nvmlDeviceGetGpuFabricInfoV", device, given) == 0
    told = {
        "state": info.state,
        "status": info.status,
        "clique": info.cliqueId,
        "uuid": bytes(bytearray(info.clusterUuid)).hex(),
        "healthMask": info.healthMask,
    }
    assert str(told) == RECORDED[f"nvml.{index}.fabric"]


@pytest.mark.parametrize("name", sorted(key for key in RECORDED if key.startswith("nvml.p2p.")))
def test_the_peer_status_is_the_recorded_one(name: str, machine: SimulatedMachine) -> None:
    first, second = (machine.call("nvmlDeviceGetHandleByIndex", index) for index in (0, 1))
    index = getattr(pynvml, name.removeprefix("nvml.p2p."))
    try:
        answer = str(machine.call("nvmlDeviceGetP2PStatus", first, second, index))
    except ctypes.ArgumentError as error:
        answer = repr(error)[:60]
    assert answer == RECORDED[name]


def test_confidential_computing_and_the_state_after_shutdown_are_recorded(machine: SimulatedMachine) -> None:
    state = machine.call("nvmlSystemGetConfComputeState")
    told = {"env": state.environment, "feature": state.ccFeature, "dev": state.devToolsMode}
    assert str(told) == RECORDED["nvml.confcompute"]
    machine.call("nvmlShutdown")
    with pytest.raises(pynvml.NVMLError) as caught:
        machine.call("nvmlDeviceGetCount")
    assert str(caught.value) == RECORDED["nvml.after_shutdown"]


# ------------------------------------------------------------- not recorded


def test_init_and_shutdown_are_counted() -> None:
    machine = machine_of(recorded_topology())
    assert code_of(machine, "nvmlDeviceGetCount") == pynvml.NVML_ERROR_UNINITIALIZED
    assert code_of(machine, "nvmlShutdown") == pynvml.NVML_ERROR_UNINITIALIZED
    machine.call("nvmlInit")
    machine.call("nvmlInit")
    machine.call("nvmlShutdown")
    assert machine.call("nvmlDeviceGetCount") == 2
    machine.call("nvmlShutdown")
    assert code_of(machine, "nvmlDeviceGetCount") == pynvml.NVML_ERROR_UNINITIALIZED


def test_errors_are_of_the_subclass_that_callers_catch() -> None:
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        machine_of(recorded_topology()).call("nvmlDeviceGetCount")


@pytest.mark.parametrize("index", [-1, 2])
def test_an_index_outside_the_node_is_an_invalid_argument(index: int, machine: SimulatedMachine) -> None:
    expected = pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert code_of(machine, "nvmlDeviceGetHandleByIndex", index) == expected


def test_a_struct_of_an_unknown_version_is_refused_and_version_3_is_taken(machine: SimulatedMachine) -> None:
    device = machine.call("nvmlDeviceGetHandleByIndex", 0)
    info = pynvml.c_nvmlGpuFabricInfoV_t()
    info.version = 0x01000024
    mismatch = pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH
    assert code_of(machine, "nvmlDeviceGetGpuFabricInfoV", device, ctypes.byref(info)) == mismatch
    newest = pynvml.c_nvmlGpuFabricInfo_v3_t()
    newest.version = 0x03000028
    assert machine.call("nvmlDeviceGetGpuFabricInfoV", device, ctypes.byref(newest)) == 0
    assert newest.state == 3


def test_a_machine_without_a_fabric_says_not_supported(machine: SimulatedMachine) -> None:
    changed = said(machine, fabric=None)
    device = changed.call("nvmlDeviceGetHandleByIndex", 0)
    info = pynvml.c_nvmlGpuFabricInfoV_t()
    expected = pynvml.NVML_ERROR_NOT_SUPPORTED
    assert code_of(changed, "nvmlDeviceGetGpuFabricInfoV", device, ctypes.byref(info)) == expected


def test_everything_a_topology_says_of_the_fabric_is_told(machine: SimulatedMachine) -> None:
    fabric = Fabric(state=3, status=9, clique_id=32766, cluster_uuid="0123456789abcdef" * 2, health_mask=5)
    changed = said(machine, fabric=fabric)
    info = pynvml.c_nvmlGpuFabricInfoV_t()
    changed.call("nvmlDeviceGetGpuFabricInfoV", changed.call("nvmlDeviceGetHandleByIndex", 1), info)
    assert (info.state, info.status, info.cliqueId, info.healthMask) == (3, 9, 32766, 5)
    assert bytes(bytearray(info.clusterUuid)).hex() == fabric.cluster_uuid


def test_confidential_computing_is_told_both_ways(machine: SimulatedMachine) -> None:
    changed = said(machine, confidential_compute=True)
    assert changed.call("nvmlSystemGetConfComputeState").ccFeature == 1
    settings = pynvml.c_nvmlSystemConfComputeSettings_v1_t()
    assert changed.call("nvmlSystemGetConfComputeSettings", ctypes.byref(settings)) == 0
    assert settings.ccFeature == 1


@pytest.mark.parametrize(
    ("links", "pair", "nvlink", "reads"),
    [
        (Links(kind="bridge", islands=[[0, 1], [2, 3]]), (0, 1), True, True),
        (Links(kind="bridge", islands=[[0, 1], [2, 3]]), (1, 2), False, True),
        (Links(kind="bridge", islands=[[0, 1]], pcie_p2p=False), (1, 2), False, False),
        (Links(kind="pcie", pcie_p2p=True), (0, 3), False, True),
    ],
)
def test_the_peer_status_follows_the_links(
    links: Links, pair: tuple[int, int], nvlink: bool, reads: bool
) -> None:
    machine = machine_of(recorded_topology(4).model_copy(update={"links": links}))
    machine.call("nvmlInit")
    first, second = (machine.call("nvmlDeviceGetHandleByIndex", index) for index in pair)

    def ok(index: int) -> bool:
        status = machine.call("nvmlDeviceGetP2PStatus", first, second, index)
        return bool(status == pynvml.NVML_P2P_STATUS_OK)

    assert ok(pynvml.NVML_P2P_CAPS_INDEX_NVLINK) is nvlink
    assert ok(pynvml.NVML_P2P_CAPS_INDEX_WRITE) is reads
    assert ok(0) is reads
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        machine.call("nvmlDeviceGetP2PStatus", first, second, 99)


def test_indices_are_those_of_the_own_node() -> None:
    topology = recorded_topology().model_copy(update={"nodes": 2})
    machine = machine_of(topology, rank=3)
    machine.call("nvmlInit")
    assert machine.call("nvmlDeviceGetCount") == 2
    first, second = (machine.call("nvmlDeviceGetHandleByIndex", index) for index in (0, 1))
    assert machine.call("nvmlDeviceGetP2PStatus", first, second, pynvml.NVML_P2P_CAPS_INDEX_NVLINK) == 0


def test_what_the_topology_refuses_is_refused_before_anything_else() -> None:
    does = Does(multicast=True, refuses={"nvmlInit": "NVML_ERROR_DRIVER_NOT_LOADED"})
    topology = recorded_topology().model_copy(update={"does": does, "says": Says()})
    assert code_of(machine_of(topology), "nvmlInit") == pynvml.NVML_ERROR_DRIVER_NOT_LOADED
