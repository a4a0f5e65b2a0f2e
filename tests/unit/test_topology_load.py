"""Topologies and overlays: what ships, where names are looked up, and mistakes in files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from faultlab.errors import ScenarioError
from faultlab.topology.load import (
    Library,
    TopologyMissing,
    available_topologies,
    is_topology_file,
    load_topology,
    package_folder,
    read_file,
)
from faultlab.topology.models import Overlay, Topology

TOPOLOGY = """\
topology-file: 1
name: {name}
title: Two GPUs
gpus: {{count: 2, model: X, memory_gib: 8, compute_capability: 9.0}}
links: {{kind: nvswitch}}
says: {{attributes: {{MULTICAST_SUPPORTED: 1}}}}
does: {{multicast: true}}
"""
OVERLAY = """\
topology-file: 1
overlay: {name}
title: A state
attributes: {{MULTICAST_SUPPORTED: 0}}
refuses: {{cuMulticastCreate: CUDA_ERROR_NOT_SUPPORTED}}
"""


def write(folder: Path, name: str, text: str = TOPOLOGY) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.yaml"
    path.write_text(text.format(name=name))
    return path


# ---------------------------------------------------------------- what ships


SHIPPED = sorted(package_folder().glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=[path.stem for path in SHIPPED])
def test_shipped_files_are_right_and_short(path: Path) -> None:
    made = read_file(path)
    assert made.name == path.stem
    assert made.title
    assert made.source
    assert len(path.read_text().splitlines()) < 20


def test_the_shipped_names() -> None:
    names = {path.stem for path in SHIPPED}
    assert {"hgx-h100-8", "h200-nvl-4", "pcie-4", "probe-says-yes", "multicast-refused"} <= names


@pytest.mark.parametrize(
    ("name", "gpus", "says", "does", "rungs"),
    [
        ("hgx-h100-8", 8, 1, True, ("mnnvl", "trtllm", "none")),
        ("h200-nvl-4", 4, 0, False, ("trtllm", "none")),
        ("pcie-4", 4, 0, False, ("trtllm", "none")),
    ],
)
def test_the_shipped_machines(
    name: str, gpus: int, says: int, does: bool, rungs: tuple[str, ...], tmp_path: Path
) -> None:
    topology = load_topology(name, tmp_path)
    assert topology.gpu_count == gpus
    assert topology.says.attributes["MULTICAST_SUPPORTED"] == says
    assert topology.does.multicast is does
    assert topology.rungs(2) == rungs


def test_the_bridge_is_one_island(tmp_path: Path) -> None:
    topology = load_topology("h200-nvl-4", tmp_path)
    assert all(topology.nvlink(a, b) for a in range(4) for b in range(4) if a != b)
    assert not load_topology("pcie-4", tmp_path).nvlink(0, 1)


@pytest.mark.parametrize("name", ["hgx-h100-8", "h200-nvl-4", "pcie-4"])
@pytest.mark.parametrize("overlay", ["probe-says-yes", "multicast-refused"])
def test_the_shipped_states_take_multicast_away(name: str, overlay: str, tmp_path: Path) -> None:
    library = Library(tmp_path)
    topology = library.overlay(overlay).laid_over(library.topology(name))
    assert topology.label == f"{name}.{overlay}"
    assert topology.rungs(2) == ("trtllm", "none")
    if overlay == "probe-says-yes":
        assert topology.says.attributes["MULTICAST_SUPPORTED"] == 1


# ------------------------------------------------------------------- look-up


def test_beside_comes_before_the_project_and_the_package(tmp_path: Path) -> None:
    project = tmp_path / "scenarios" / "topologies"
    deep = tmp_path / "a" / "b" / "c"
    deep.mkdir(parents=True)
    assert load_topology("pcie-4", deep).gpu_count == 4
    write(project, "pcie-4")
    assert load_topology("pcie-4", deep).gpu_count == 2
    write(deep, "pcie-4", TOPOLOGY.replace("count: 2", "count: 3"))
    assert load_topology("pcie-4", deep).gpu_count == 3
    assert load_topology("pcie-4", deep / "scenario.yaml").gpu_count == 3


def test_the_nearest_project_is_taken_and_not_from_too_far(tmp_path: Path) -> None:
    write(tmp_path / "scenarios" / "topologies", "mine")
    near = tmp_path / "inner"
    write(near / "scenarios" / "topologies", "mine", TOPOLOGY.replace("count: 2", "count: 5"))
    assert load_topology("mine", near).gpu_count == 5
    far = tmp_path.joinpath(*"abcdefghijklm")
    far.mkdir(parents=True)
    with pytest.raises(TopologyMissing):
        load_topology("mine", far)


def test_other_folders_to_search(tmp_path: Path) -> None:
    write(tmp_path / "more", "mine")
    beside = tmp_path / "scenario.yaml"
    assert Library(beside, [tmp_path / "more"]).topology("mine").name == "mine"


def test_a_scenario_of_the_same_name_is_no_topology(tmp_path: Path) -> None:
    (tmp_path / "pcie-4.yaml").write_text("faultlab: 1\n")
    assert load_topology("pcie-4", tmp_path).gpu_count == 4


@pytest.mark.parametrize("name", ["../mine", "/etc/passwd", "a/b", "", ".", "mine.yaml", "a\0b"])
def test_a_name_is_no_path(name: str, tmp_path: Path) -> None:
    write(tmp_path, "mine")
    with pytest.raises(TopologyMissing):
        load_topology(name, tmp_path / "inner")


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    write(tmp_path / "outside", "mine")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "mine.yaml").symlink_to(tmp_path / "outside" / "mine.yaml")
    with pytest.raises(TopologyMissing):
        load_topology("mine", inside)


def test_a_missing_name_comes_with_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(TopologyMissing) as caught:
        load_topology("hgx-h100", tmp_path)
    assert caught.value.hint == "did you mean 'hgx-h100-8'?"


def test_an_overlay_is_no_topology_and_the_other_way(tmp_path: Path) -> None:
    library = Library(tmp_path)
    with pytest.raises(TopologyMissing, match="is an overlay, not a topology"):
        library.topology("probe-says-yes")
    with pytest.raises(TopologyMissing, match="is a topology, not an overlay"):
        library.overlay("pcie-4")


def test_what_is_available(tmp_path: Path) -> None:
    write(tmp_path, "mine")
    write(tmp_path, "state", OVERLAY)
    write(tmp_path, "broken", "topology-file: 1\nname: [")
    write(tmp_path, "pcie-4")
    found = {each.name: each for each in available_topologies(tmp_path / "x.yaml")}
    assert not found["mine"].is_overlay
    assert found["mine"].title == "Two GPUs"
    assert found["state"].is_overlay
    assert "not YAML" in found["broken"].error
    assert found["pcie-4"].path.parent == tmp_path
    assert "hgx-h100-8" in found


def test_a_folder_that_cannot_be_listed(tmp_path: Path) -> None:
    assert {each.name for each in available_topologies(tmp_path / "nowhere" / "x.yaml")} >= {"pcie-4"}


# ------------------------------------------------------------------ mistakes


def test_an_overlay_is_read(tmp_path: Path) -> None:
    made = read_file(write(tmp_path, "state", OVERLAY))
    assert isinstance(made, Overlay)
    assert made.refuses == {"cuMulticastCreate": "CUDA_ERROR_NOT_SUPPORTED"}


def test_a_number_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = read_file(write(tmp_path, "mine"))
    assert isinstance(made, Topology)
    assert made.gpus.compute_capability == "9.0"


@pytest.mark.parametrize(
    ("text", "place", "message", "hint"),
    [
        (TOPOLOGY.replace("name: {name}", "name: other"), "2:7", "is not that of the file", "write mine"),
        (TOPOLOGY.replace("links", "link"), "5:1", "unknown key 'link'", "did you mean 'links'?"),
        (TOPOLOGY.replace("file: 1", "file: 2"), "1:16", "must be 1, the version", ""),
        (
            TOPOLOGY.replace("nvswitch", "nvswich"),
            "5:15",
            "'kind' must be nvswitch, bridge",
            "mean 'nvswitch'",
        ),
        (TOPOLOGY.replace("nvswitch", "bridge"), "5:8", "needs islands", "islands: [[0, 1]"),
        (TOPOLOGY.replace("nvswitch", "pcie, islands: [[0, 1]]"), "5:21", "only a machine of kind", ""),
        (TOPOLOGY.replace("nvswitch", "bridge, islands: [[0, 2]]"), "5:37", "GPU 2 is outside the node", ""),
        (TOPOLOGY.replace("nvswitch", "bridge, islands: [[0], [0]]"), "5:39", "GPU 0 is in two islands", ""),
        (
            TOPOLOGY.replace("MULTICAST_SUPPORTED: 1", "MULTICAST: 1"),
            "6:21",
            "no attribute is called",
            "did you",
        ),
        (TOPOLOGY.replace("MULTICAST_SUPPORTED: 1", "MULTICAST_SUPPORTED: 2"), "6:42", "is 0 or 1", ""),
        (
            TOPOLOGY.replace("true", "true, refuses: {{cuMemMpa: X}}"),
            "7:35",
            "no call is called",
            "'cuMemMap'",
        ),
        (
            TOPOLOGY.replace("true", "true, refuses: {{cuMemMap: CUDA_ERROR_UNKNOWN}}"),
            "7:45",
            "cuMemMap cannot return CUDA_ERROR_UNKNOWN",
            "it can return",
        ),
        (TOPOLOGY.replace("true", "true, fabric_handles: no"), "7:41", "no code is called 'no'", "'works'"),
        (TOPOLOGY.replace("multicast: true", ""), "7:7", "the key 'multicast' is missing", ""),
        (TOPOLOGY.replace("count: 2", "count: 2000"), "4:15", "'count' must be at most 1024", ""),
        (TOPOLOGY.replace("count: 2", "count: 1000") + "nodes: 9\n", "4:15", "has 9000 GPUs", ""),
        (TOPOLOGY.replace("9.0", "sm90"), "4:63", "'compute_capability' must be two numbers with a dot", ""),
        (TOPOLOGY + "overlays: [x]\n", "8:1", "unknown key 'overlays'", ""),
        (OVERLAY.replace("refuses", "refuse"), "5:1", "unknown key 'refuse'", "did you mean 'refuses'?"),
        (OVERLAY.replace("overlay: {name}", "overlay: other"), "2:10", "is not that of the file", ""),
        (OVERLAY.replace("MULTICAST_SUPPORTED: 0", "MULTICAST: 0"), "4:14", "no attribute is called", ""),
        (OVERLAY.replace("_SUPPORTED}}", "}}"), "5:30", "no code is called", "'CUDA_ERROR_NOT_SUPPORTED'"),
        ("- topology-file\n", "1:1", "a topology file is a mapping", ""),
    ],
)
def test_mistakes_have_places(text: str, place: str, message: str, hint: str, tmp_path: Path) -> None:
    path = write(tmp_path, "mine", text)
    with pytest.raises(ScenarioError) as caught:
        read_file(path)
    assert f"{path}:{place}: " in str(caught.value)
    assert message in str(caught.value)
    assert hint in str(caught.value)


def test_is_topology_file_never_raises(tmp_path: Path) -> None:
    assert is_topology_file(write(tmp_path, "mine"))
    assert is_topology_file(write(tmp_path, "broken", "topology-file: [\n"))
    assert not is_topology_file(tmp_path)
    assert not is_topology_file(tmp_path / "absent.yaml")
    junk = tmp_path / "junk.yaml"
    junk.write_bytes(os.urandom(1_000).replace(b"topology", b""))
    assert not is_topology_file(junk)
