"""The matrix: combinations, ids, what is left out, and mistakes at the value that is wrong."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from faultlab import limits
from faultlab.errors import ScenarioError, ScenarioErrors
from faultlab.scenario.load import load_file
from faultlab.scenario.models import Scenario

HEAD = "faultlab: 1\ntitle: A title\ntopology: hgx-h100-8\nsubject: reference\n"
FAULT = HEAD + "faults:\n  - at: cuMemMap\n    effect: {hang: true}\n"
FAULTS = FAULT + "  - at: cuMemCreate\n    effect: {hang: true}\n"


def load(folder: Path, text: str, name: str = "one.yaml") -> list[Scenario]:
    path = folder / name
    path.write_text(text)
    return load_file(path)


def ids(folder: Path, text: str) -> list[str]:
    return [scenario.id for scenario in load(folder, text)]


# ------------------------------------------------------------------------ ids


@pytest.mark.parametrize(
    ("matrix", "expected"),
    [
        ("{ranks: [2, 4]}", ["ranks=2", "ranks=4"]),
        ("{workspace.creation: [real, mocked]}", ["creation=real", "creation=mocked"]),
        (
            "{ranks: [2, 4], subject: [reference, hardened]}",
            [
                "ranks=2,subject=reference",
                "ranks=2,subject=hardened",
                "ranks=4,subject=reference",
                "ranks=4,subject=hardened",
            ],
        ),
        ("{faults.0.ranks: {all: all, one: [1]}}", ["ranks=all", "ranks=one"]),
        (
            "{faults.0.ranks: {all: all, one: [1]}, ranks: [2]}",
            ["faults.0.ranks=all,ranks=2", "faults.0.ranks=one,ranks=2"],
        ),
        ("{faults.0.ranks: [[0, 1], first, {node: 0}]}", ["ranks=0.1", "ranks=first", "ranks=node-0"]),
        ("{faults.0.effect: [{error: 1}, {raise: OSError, after_s: 0.5}]}", None),
        (
            "{topology: [pcie-4, {preset: pcie-4, overlay: probe-says-yes}]}",
            ["topology=pcie-4", "topology=pcie-4.probe-says-yes"],
        ),
        (
            "{topology: [{preset: pcie-4, overlay: [probe-says-yes, multicast-refused]}]}",
            ["topology=pcie-4.probe-says-yes.multicast-refused"],
        ),
        (
            "{subject: [{name: vllm, version: 0.10, flashinfer: 0.7.4}, 'canary:no_leak', 'a.b:C']}",
            ["subject=vllm-0.10.fi-0.7.4", "subject=canary-no_leak", "subject=a.b-C"],
        ),
        ("{budget.init_s: [0.5, 20, 1e2]}", ["init_s=0.5", "init_s=20", "init_s=1e2"]),
        ("{title: ['A b, c=d [e]', 'é']}", ["title=A-b-c-d-e", "title=empty"]),
        ("{faults: {none: [], one: [{at: cuMemMap, effect: {kill: true}}]}}", ["faults=none", "faults=one"]),
        ("{faults.0: {kill: {at: cuMemMap, effect: {kill: true}}}}", ["faults.0=kill"]),
        ("{lanes: [[sim], [sim, gpu]]}", ["lanes=sim", "lanes=sim.gpu"]),
        ("{faults.0.optional: [true, false]}", ["optional=true", "optional=false"]),
        ("{source: [null, x]}", ["source=null", "source=x"]),
    ],
)
def test_ids(matrix: str, expected: list[str] | None, tmp_path: Path) -> None:
    found = ids(tmp_path, f"{FAULT}matrix: {matrix}\n")
    if expected is not None:
        assert found == [f"one[{each}]" for each in expected]
    assert len(set(found)) == len(found)
    assert all(re.fullmatch(r"[A-Za-z0-9._=,\[\]-]+", each) for each in found)


def test_axes_with_the_same_last_part_are_written_out(tmp_path: Path) -> None:
    text = FAULTS + "matrix: {faults.0.ranks: [first], faults.1.ranks: [last], workspace.backend: [auto]}\n"
    assert ids(tmp_path, text) == ["one[faults.0.ranks=first,faults.1.ranks=last,backend=auto]"]


def test_ids_do_not_depend_on_the_rest_of_the_file(tmp_path: Path) -> None:
    first = ids(tmp_path, FAULT + "matrix: {ranks: [2, 4]}\n")
    assert (
        ids(tmp_path, "# x\n" + FAULT.replace("A title", "B") + "matrix:\n  ranks:\n    - 2\n    - 4\n")
        == first
    )


def test_each_scenario_knows_its_labels_and_its_line(tmp_path: Path) -> None:
    text = FAULT + "matrix:\n  faults.0.ranks:\n    all: all\n    one: [1]\n  ranks: [2, 4]\n"
    scenarios = load(tmp_path, text)
    assert scenarios[2].matrix == {"faults.0.ranks": "one", "ranks": "2"}
    assert [scenario.line for scenario in scenarios] == [10, 10, 11, 11]


# ------------------------------------------------------------- what is varied


def test_values_replace_what_the_file_says(tmp_path: Path) -> None:
    text = FAULT + "matrix: {ranks: [2, 4], faults.0.effect: {a: {kill: true}, b: {error: 800}}}\n"
    scenarios = load(tmp_path, text)
    assert [scenario.ranks for scenario in scenarios] == [2, 2, 4, 4]
    assert [scenario.faults[0].effect.kind for scenario in scenarios] == ["kill", "error"] * 2
    assert scenarios[1].faults[0].effect.error == "CUDA_ERROR_NOT_PERMITTED"


def test_what_is_absent_is_made(tmp_path: Path) -> None:
    text = (
        HEAD.replace("topology: hgx-h100-8\n", "")
        + "matrix: {topology: [pcie-4], workspace.creation: [mocked]}\n"
    )
    (scenario,) = load(tmp_path, text)
    assert scenario.workspace.creation == "mocked"
    assert scenario.topology.name == "pcie-4"
    (scenario,) = load(tmp_path, HEAD + "workspace:\nmatrix: {workspace.creation: [mocked]}\n")
    assert scenario.workspace.creation == "mocked"


def test_a_longer_path_changes_what_a_shorter_one_has_set(tmp_path: Path) -> None:
    text = FAULT + "matrix: {faults.0: {a: {at: cuMemMap, effect: {kill: true}}}, faults.0.ranks: [first]}\n"
    assert load(tmp_path, text)[0].faults[0].ranks == "first"


def test_a_case_sets_several_places_at_once(tmp_path: Path) -> None:
    text = FAULT + (
        "matrix:\n  case:\n"
        "    bind: {faults.0.at: cuMulticastBindMem, expect.path: trtllm, expect.outcome: fallback}\n"
        "    create: {faults.0.at: cuMemCreate, expect.path: none}\n"
        "  ranks: [2, 4]\n"
    )
    scenarios = load(tmp_path, text)
    assert [scenario.id for scenario in scenarios] == [
        f"one[case={case},ranks={ranks}]" for case in ("bind", "create") for ranks in (2, 4)
    ]
    assert [(each.faults[0].at, each.expect.path, each.expect.outcome) for each in scenarios[::2]] == [
        ("cuMulticastBindMem", "trtllm", "fallback"),
        ("cuMemCreate", "none", None),
    ]


def test_the_base_of_one_combination_is_not_changed_by_another(tmp_path: Path) -> None:
    text = FAULT + "matrix: {case: {a: {workspace.creation: mocked}, b: {ranks: 2}}}\n"
    first, second = load(tmp_path, text)
    assert (first.workspace.creation, first.ranks) == ("mocked", 8)
    assert (second.workspace.creation, second.ranks) == ("real", 2)


# ---------------------------------------------------------------- left out


@pytest.mark.parametrize(
    ("exclude", "expected"),
    [
        ("[{ranks: 8, topology: pcie-4}]", ["pcie-4,2", "hgx-h100-8,2", "hgx-h100-8,8"]),
        ("[{ranks: '8', topology: pcie-4}]", ["pcie-4,2", "hgx-h100-8,2", "hgx-h100-8,8"]),
        ("[{ranks: 8}]", ["pcie-4,2", "hgx-h100-8,2"]),
        ("[{ranks: 8, topology: pcie-4}, {topology: hgx-h100-8, ranks: 2}]", ["pcie-4,2", "hgx-h100-8,8"]),
    ],
)
def test_exclude(exclude: str, expected: list[str], tmp_path: Path) -> None:
    text = f"{HEAD}matrix: {{topology: [pcie-4, hgx-h100-8], ranks: [2, 8], exclude: {exclude}}}\n"
    found = [f"{each.matrix['topology']},{each.matrix['ranks']}" for each in load(tmp_path, text)]
    assert found == expected


def test_exclude_names_axes_and_values_as_the_file_or_the_ids_do(tmp_path: Path) -> None:
    base = (
        FAULT
        + "matrix:\n  faults.0.effect: {a: {kill: true}, b: {error: 800}}\n  workspace.creation: [real, mocked]\n"
    )
    for axis, value in (("effect", "a"), ("faults.0.effect", "a"), ("effect", "{kill: true}")):
        text = base + f"  exclude: [{{{axis}: {value}, creation: real}}]\n"
        assert len(ids(tmp_path, text)) == 3
    overlay = "{preset: pcie-4, overlay: probe-says-yes}"
    text = HEAD + f"matrix: {{topology: [pcie-4, {overlay}], exclude: [{{topology: {overlay}}}]}}\n"
    assert ids(tmp_path, text) == ["one[topology=pcie-4]"]


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (HEAD + "matrix: {ranks: [2, »16]}\n", "16 ranks need a GPU each", "'exclude' in the matrix"),
        (HEAD + "matrix: {subject: [reference, »vlm]}\n", "no subject is called 'vlm'", "mean 'vllm'?"),
        (HEAD + "matrix: {topology: [pcie-4, {preset: »pci-4}]}\n", "no topology is called", "'pcie-4'?"),
        (
            FAULT + "matrix:\n  faults.0.effect:\n    a: {kill: true}\n    b: {error: »CUDA_ERROR_UNKNOWN}\n",
            "cuMemMap cannot return CUDA_ERROR_UNKNOWN",
            "it can return",
        ),
        (FAULT + "matrix: {faults.0.effect: {a: {»eror: 1}}}\n", "unknown key 'eror'", "mean 'error'?"),
        (
            FAULT + "matrix: {case: {a: {faults.0.at: cuMemMap}, b: {faults.0.at: »cuMemMpa}}}\n",
            "no site is called 'cuMemMpa'",
            "did you mean 'cuMemMap'?",
        ),
        (
            FAULT.replace("{hang: true}", "{hang: true}\n    ranks: [»3]") + "matrix: {ranks: [2, 4]}\n",
            "rank 3 does not run: the scenario has 2 ranks (from 0), in [ranks=2]",
            "'exclude' in the matrix",
        ),
        (HEAD + "matrix: {»rank: [2]}\n", "the axis 'rank' is no key of the file", "mean 'ranks'?"),
        (HEAD + "matrix: {»faultlab: [1]}\n", "the axis 'faultlab' is no key of the file", ""),
        (HEAD + "matrix: {»workspace.creaton: [real]}\n", "unknown key 'creaton'", "mean 'creation'?"),
        (HEAD + "matrix: {»workspace..creation: [real]}\n", "is no path", "faults.0.ranks"),
        (HEAD + "matrix: {»workspace.a.b.c.d.e.f.g.h.i: [real]}\n", "is no path", ""),
        (HEAD + "matrix: {»faults.0.at: [cuMemMap]}\n", "no place for '0'", "the file has the faults"),
        (FAULT + "matrix: {»faults.1.at: [cuMemMap]}\n", "the list has no entry 1 (from 0)", "it has 1"),
        (FAULT + "matrix: {»faults.at: [cuMemMap]}\n", "the list has no entry at", ""),
        (HEAD + "matrix: {»topology.overlay: [x]}\n", "no place for 'overlay'", "{preset: NAME}"),
        (HEAD + "matrix: {»subject.version: ['1']}\n", "no place for 'version'", "{name: NAME}"),
        (HEAD + "matrix: {ranks: »[]}\n", "the axis 'ranks' needs a list of values", "[first, second]"),
        (HEAD + "matrix: {ranks: »4}\n", "the axis 'ranks' needs a list of values", ""),
        (HEAD + "matrix: »[ranks]\n", "a matrix maps axes to their values", "matrix: {ranks: [2, 4]}"),
        (HEAD + "»matrix: {}\n", "the matrix has no axis", "matrix: {ranks: [2, 4]}"),
        (HEAD + "matrix: {ranks: [2, »2]}\n", "two values of 'ranks' are called '2'", "labels"),
        (HEAD + "matrix: {title: ['a b', »'a,b']}\n", "two values of 'title' are called 'a-b'", "labels"),
        (HEAD + "matrix: {title: {»'a b': x}}\n", "the label 'a b' is part of an id", ""),
        (HEAD + "matrix: {case: »[a]}\n", "cases have labels", ""),
        (HEAD + "matrix: {case: {a: »1}}\n", "the case 'a' maps paths to values", ""),
        (HEAD + "matrix: {case: {a: {»rank: 1}}}\n", "the axis 'rank' is no key", "mean 'ranks'?"),
        (HEAD + "matrix: {case: {a: {ranks: 2}}, »ranks: [4]}\n", "'ranks' overwrites what 'ranks'", ""),
        (
            FAULT + "matrix: {faults.0.at: [cuMemMap], »faults: {a: []}}\n",
            "'faults' overwrites what 'faults.0.at' has set",
            "the shorter path comes first",
        ),
        (HEAD + "matrix: {ranks: [2], exclude: »{ranks: 2}}\n", "exclude is a list", ""),
        (HEAD + "matrix: {ranks: [2], exclude: [»2]}\n", "an entry of exclude maps axes to values", ""),
        (HEAD + "matrix: {ranks: [2], exclude: [{»rank: 2}]}\n", "no axis is called 'rank'", "'ranks'?"),
        (
            HEAD + "matrix: {ranks: [2], exclude: [{ranks: »3}]}\n",
            "'ranks' has no value '3'",
            "known here: 2",
        ),
        (HEAD + "»matrix: {ranks: [2], exclude: [{ranks: 2}]}\n", "every combination", ""),
    ],
)
def test_mistakes(text: str, message: str, hint: str, tmp_path: Path) -> None:
    before, _, after = text.partition("»")
    line, column = before.count("\n") + 1, len(before.rpartition("\n")[2]) + 1
    with pytest.raises(ScenarioError) as caught:
        load(tmp_path, before + after)
    error = caught.value
    assert isinstance(error, ScenarioErrors)
    assert len(error.errors) == 1, str(error)
    assert (error.line, error.column) == (line, column), str(error)
    assert message in error.message
    assert hint in str(error)


def test_a_mistake_in_every_combination_is_reported_once(tmp_path: Path) -> None:
    with pytest.raises(ScenarioErrors) as caught:
        load(
            tmp_path,
            FAULT.replace("cuMemMap", "cuMemMpa") + "matrix: {ranks: [2, 4], lanes: [[sim], [gpu]]}\n",
        )
    assert len(caught.value.errors) == 1


def test_a_wrong_matrix_does_not_hide_other_mistakes(tmp_path: Path) -> None:
    with pytest.raises(ScenarioErrors) as caught:
        load(tmp_path, HEAD + "lanes: [cpu]\nmatrix: {rank: [2]}\n")
    assert [each.line for each in caught.value.errors] == [5, 6]


# -------------------------------------------------------------------- limits


def hostile_matrices() -> dict[str, str]:
    numbers = ", ".join(map(str, range(1, 101)))
    titles = ", ".join(f"t{index}" for index in range(3_000))
    axes = ", ".join(f"budget.a{index}: [1, 2]" for index in range(200))
    excluded = ", ".join(["{ranks: 1}"] * 1_000)
    paths = ", ".join(f"budget.a{index}: 1" for index in range(5_000))
    return {
        "product": f"{{ranks: [{numbers}], budget.init_s: [{numbers}]}}",
        "axis": f"{{title: [{titles}]}}",
        "axes": f"{{{axes}}}",
        "exclude": f"{{ranks: [1, 2], exclude: [{excluded}]}}",
        "case": f"{{case: {{a: {{{paths}}}}}}}",
    }


@pytest.mark.parametrize("name", hostile_matrices())
def test_a_huge_matrix_is_refused_at_once(name: str, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ScenarioErrors):
        load(tmp_path, f"{HEAD}matrix: {hostile_matrices()[name]}\n")
    assert time.monotonic() - began < 5


def test_many_combinations_of_a_large_file_are_refused(tmp_path: Path) -> None:
    faults = "  - {at: cuMemMap, effect: {hang: true}, calls: [" + "1, " * 900 + "1]}\n"
    text = (
        HEAD
        + "faults:\n"
        + faults * 10
        + "matrix: {budget.init_s: ["
        + ", ".join(map(str, range(1, 1_000)))
        + "]}\n"
    )
    with pytest.raises(ScenarioErrors, match="999 combinations of a file with"):
        load(tmp_path, text)


def test_as_many_combinations_as_are_allowed(tmp_path: Path) -> None:
    numbers = ", ".join(f"0.{index:04}1" for index in range(limits.MATRIX_SCENARIOS // 2))
    assert len(load(tmp_path, f"{HEAD}matrix: {{ranks: [2, 4], budget.init_s: [{numbers}]}}\n")) == 2_000


def test_an_id_can_be_the_name_of_a_folder(tmp_path: Path) -> None:
    long = "x" * 79
    matrix = "{" + ", ".join(f"{axis}: {{{long}: x}}" for axis in ("title", "source", "subject.name")) + "}"
    with pytest.raises(ScenarioErrors, match="at most 200 are possible"):
        load(tmp_path, f"{HEAD.replace('reference', '{name: vllm}')}matrix: {matrix}\n")
