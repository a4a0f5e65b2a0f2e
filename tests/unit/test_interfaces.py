"""The interfaces that others build on: machine, subject, events, sites, limits of layers."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from typing import get_type_hints

import pytest

from faultlab import events
from faultlab.codes import CUDA, NVML, STICKY
from faultlab.machine.base import Machine
from faultlab.machine.simulated.machine import SimulatedMachine
from faultlab.rank.steps import compare, make_input, make_reference
from faultlab.scenario.models import WorkspaceSpec
from faultlab.sites import DOMAINS, SITES
from faultlab.subjects.flashinfer import FlashInfer
from faultlab.subjects.reference import Reference
from tests.conftest import REPOSITORY
from tests.unit.machines import pair

#: Which packages of the lab each one may import: what is below knows nothing above.
LAYERS = {
    "codes": set(),
    "errors": set(),
    "limits": set(),
    "sites": {"codes"},
    "events": set(),
    "topology": {"errors", "limits", "codes", "sites", "scenario"},
    "scenario": {"errors", "limits", "codes", "sites", "topology"},
    "machine": {"codes", "errors", "sites", "topology", "limits"},
    "injector": {"codes", "machine", "rank", "scenario", "sites"},
    "seam": {"codes", "errors", "injector", "machine", "rank", "scenario", "sites"},
    "judge": {"errors", "events", "scenario", "sites", "machine", "codes", "topology", "limits"},
}


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_nothing_below_knows_anything_above(name: str) -> None:
    package = REPOSITORY / "faultlab" / name
    files = (
        [package.with_suffix(".py")] if package.with_suffix(".py").exists() else sorted(package.rglob("*.py"))
    )
    assert files
    for path in files:
        for imported in _imports(path):
            assert imported == name or imported in LAYERS[name], f"{path.name} imports faultlab.{imported}"


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "faultlab":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return found


def test_the_simulated_machine_has_the_whole_interface() -> None:
    for name, member in inspect.getmembers(Machine, inspect.isfunction):
        if name.startswith("_"):
            continue
        ours = getattr(SimulatedMachine, name)
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(member).parameters), name


def test_the_simulated_machine_knows_every_site_below_the_seam() -> None:
    board, (driver, _) = pair()
    below = [site.name for site in SITES.values() if site.domain in ("driver", "runtime", "nvml")]
    assert [name for name in below if not driver.machine.knows(name)] == []
    board.close()


@pytest.mark.parametrize("subject", [FlashInfer, Reference])
def test_a_subject_has_one_method_a_step(subject: type) -> None:
    for name in ("create", "use", "collective", "destroy", "exit"):
        assert callable(getattr(subject, name))
    assert isinstance(get_type_hints(subject), dict)


def test_every_site_has_a_domain_and_real_codes() -> None:
    for site in SITES.values():
        assert site.domain in DOMAINS
        assert all(error in CUDA or error in NVML for error in site.errors), site.name
    assert set(CUDA) >= STICKY


def test_events_are_read_as_written_and_a_half_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    event = {"v": events.VERSION, "n": 0, "t": 0.5, "kind": "exit", "status": 0}
    path.write_bytes(events.dump(event) + b"\n" + b'{"v":1,"n":1,"t"')
    assert list(events.read(path)) == [event]
    assert list(events.read(tmp_path / "absent.jsonl")) == []


def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_text(json.dumps({"v": events.VERSION + 1}) + "\n")
    with pytest.raises(ValueError, match="event schema"):
        list(events.read(path))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_reference_is_the_exact_sum_and_a_wrong_slot_shows(dtype: str) -> None:
    workspace = WorkspaceSpec(hidden_dim=16, dtype=dtype)
    inputs = [make_input(rank, 1, 4, workspace) for rank in range(4)]
    total = sum(each.double() for each in inputs)
    reference = make_reference(4, 1)
    period = len(reference)
    assert total.view(-1)[:period].equal(reference)
    assert total.view(-1)[period:].equal(total.view(-1)[:-period])
    right = total.to(inputs[0].dtype)
    error, tolerance = compare(right, reference, right.shape, 4)
    assert error <= tolerance
    for value in (right.view(-1)[-1] + 2 * tolerance + 1, float("nan")):
        wrong = right.clone()
        wrong.view(-1)[-1] = value
        error, tolerance = compare(wrong, reference, right.shape, 4)
        assert error > tolerance
    wrong = (total - inputs[1].double() + inputs[2].double()).to(inputs[0].dtype)
    error, tolerance = compare(wrong, reference, right.shape, 4)
    assert error > tolerance
    error, tolerance = compare(right[:-1], reference, right.shape, 4)
    assert error > tolerance


@pytest.mark.parametrize("value", ["\udcff", 1 << 70, {"a": [1, None, True, "é"]}])
def test_what_is_dumped_is_loaded_again(value: object) -> None:
    data = events.dump({"v": 1, "value": value})
    assert b"\n" not in data
    assert events.load(data) == {"v": 1, "value": value}


def test_the_last_site_is_found_in_the_tail_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    entered = [{"kind": "enter", "site": f"site{number}", "thread": "main"} for number in range(3)]
    other = {"kind": "enter", "site": "elsewhere", "thread": "helper"}
    long = {"kind": "log", "thread": "main", "message": "x" * (events.TAIL_BYTES // 2)}
    lines = [long, *entered, other, {"kind": "leave", "site": "site2", "thread": "main"}]
    path.write_bytes(b"".join(events.dump(line) + b"\n" for line in lines) + b'{"kind":"ent')
    assert events.last_site(path) == "elsewhere"
    assert events.last_site(path, "main") == "site2"
    assert events.last_site(path, "nobody") == ""
    assert events.last_site(tmp_path / "none.jsonl") == ""
    path.write_bytes(path.read_bytes()[:-12] + events.dump(long) + b"\n" + events.dump(long) + b"\n")
    assert events.last_site(path) == ""
