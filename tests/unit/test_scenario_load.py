"""From a file to scenarios: what a file may say, and every mistake with its place.

In the texts of mistakes the sign ``»`` stands before the place that the error
must name; it is taken out before the file is written.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from faultlab import limits
from faultlab.errors import ScenarioError, ScenarioErrors
from faultlab.scenario import yamlnodes
from faultlab.scenario.invariants import INVARIANTS
from faultlab.scenario.load import check_paths, is_scenario_file, load_file, load_paths
from faultlab.scenario.models import DEFAULT_WORKLOAD, CallsFrom, CaptureStep, RandomRanks, Scenario, UseStep
from faultlab.scenario.schema import json_schema
from faultlab.sites import SITES

REPOSITORY = Path(__file__).parents[2]
HEAD = "faultlab: 1\ntitle: A title\ntopology: hgx-h100-8\nsubject: reference\n"
FUZZ = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(params=["libyaml", "python"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both parsers of PyYAML; a machine without libyaml reads the same files."""
    name: str = request.param
    loader = yaml.SafeLoader if name == "python" else getattr(yaml, "CSafeLoader", None)
    if loader is None:
        pytest.skip("PyYAML without libyaml")
    monkeypatch.setattr(yamlnodes, "_LOADER", loader)
    return name


def write(folder: Path, text: str | bytes, name: str = "one.yaml") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def load(folder: Path, text: str | bytes) -> list[Scenario]:
    return load_file(write(folder, text))


def one(folder: Path, text: str) -> Scenario:
    (scenario,) = load(folder, text)
    return scenario


def refused(folder: Path, text: str | bytes) -> ScenarioError:
    path = write(folder, text)
    with pytest.raises(ScenarioError) as caught:
        load_file(path)
    return caught.value


def errors_of(error: ScenarioError) -> list[ScenarioError]:
    return error.errors if isinstance(error, ScenarioErrors) else [error]


def split_mark(text: str) -> tuple[str, int, int]:
    """The text without its ``»``, and the line and column that it marks."""
    before, mark, after = text.partition("»")
    assert mark, "the text marks no place"
    return before + after, before.count("\n") + 1, len(before.rpartition("\n")[2]) + 1


# ------------------------------------------------------------- what is right


def test_the_least_a_file_can_say(tmp_path: Path) -> None:
    scenario = one(tmp_path, HEAD)
    assert scenario.id == "one"
    assert scenario.ranks == 8
    assert scenario.lanes == ("sim", "gpu")
    assert scenario.workload == DEFAULT_WORKLOAD
    assert scenario.faults == ()
    assert scenario.matrix == {}
    assert (scenario.line, scenario.column) == (1, 1)
    assert scenario.path == str(tmp_path / "one.yaml")


def test_everything_a_file_can_say(tmp_path: Path) -> None:
    scenario = one(
        tmp_path,
        """\
# A comment first.
faultlab: 1
title: 2024
source: https://example.org/1
topology: {preset: h200-nvl-4, overlay: [probe-says-yes, multicast-refused]}
ranks: 3
subject: {name: vllm, version: 0.10, flashinfer: 0.7.4}
workspace: {creation: mocked, preferred: trtllm, dtype: float16}
workload: [create, {use: {times: 3, tokens: 64}}, {capture: [use]}, collective, destroy, exit]
faults:
  - {at: cuMulticastBindMem, ranks: [1], calls: {from: 3}, effect: {error: 802, after_s: 6}}
  - {at: workspace.create, ranks: {random: 2, seed: 7}, effect: {raise: ValueError, message: no}, optional: true}
  - {at: cuDeviceGetAttribute(MULTICAST_SUPPORTED), effect: {value: 0}}
  - {at: nvmlInit, effect: {error: NVML_ERROR_UNKNOWN}, phase: create, during: mnnvl}
  - {at: fd.recv, effect: {lose: true}}
  - {at: cuMemMap, effect: {error: CUDA_ERROR_INVALID_VALUE, poisons: CUDA_ERROR_LAUNCH_FAILED, when: after}}
expect: {outcome: error, path: none, breaks: {no_leak: {url: https://a.b/c, subjects: "vllm>=0.25,<0.27"}}}
budget: {init_s: 5}
lanes: [sim]
""",
    )
    assert scenario.line == 2
    assert scenario.title == "2024"
    assert scenario.topology.label == "h200-nvl-4.probe-says-yes.multicast-refused"
    assert scenario.subject.label == "vllm-0.10.fi-0.7.4"
    assert scenario.faults[0].effect.error == "CUDA_ERROR_SYSTEM_NOT_READY"
    assert scenario.faults[0].effect.after_s == 6
    assert isinstance(scenario.faults[0].calls, CallsFrom)
    assert isinstance(scenario.faults[1].ranks, RandomRanks)
    assert isinstance(scenario.workload[1], UseStep)
    assert isinstance(scenario.workload[2], CaptureStep)
    assert scenario.expect.breaks["no_leak"].subjects == "vllm>=0.25,<0.27"
    assert scenario.lanes == ("sim",)


def test_a_machine_written_out(tmp_path: Path) -> None:
    scenario = one(
        tmp_path,
        HEAD.replace(
            "hgx-h100-8",
            "{name: mine, gpus: {count: 2, model: X, memory_gib: 8, compute_capability: 9.0}, nodes: 2,"
            " links: {kind: nvswitch}, says: {}, does: {multicast: false}}",
        ),
    )
    assert scenario.topology.name == "mine"
    assert scenario.ranks == 4


def test_a_plan_is_read_back_as_it_was(tmp_path: Path) -> None:
    # A rank reads its scenario from JSON: session.write_plan, rank.program.
    for scenario in load_paths([REPOSITORY / "scenarios" / "seed"]):
        dumped = json.loads(json.dumps(scenario.model_dump(mode="json", by_alias=True)))
        assert Scenario.model_validate(dumped) == scenario


def test_words_of_yaml_1_1_are_words(tmp_path: Path) -> None:
    document = yamlnodes.parse(
        b"{a: on, b: yes, c: 012, d: 1:30, e: 1e3, f: 0x10, g: ~, h: 0o17, i: .5}", "x"
    )
    assert document.data == {
        "a": "on",
        "b": "yes",
        "c": 12,
        "d": "1:30",
        "e": 1000.0,
        "f": 16,
        "g": None,
        "h": 15,
        "i": 0.5,
    }


def test_tags_of_the_core_schema_are_allowed() -> None:
    document = yamlnodes.parse(
        b"{a: !!str 1, b: !!int 2, c: ! 3, d: !!map {}, e: !!seq [], f: !!float 1.5}", "x"
    )
    assert document.data == {"a": "1", "b": 2, "c": "3", "d": {}, "e": [], "f": 1.5}


def test_aliases_stand_for_their_values(tmp_path: Path) -> None:
    text = HEAD + "faults:\n  - &f {at: cuMemMap, effect: {hang: true}}\n  - *f\n"
    assert len(one(tmp_path, text).faults) == 2


def test_every_place_is_known() -> None:
    document = yamlnodes.parse(b"faults:\n  - at: x\n    effect: {error: 1}\n", "x")
    places = document.positions()
    assert places["faults", 0, "effect", "error"].key == (3, 14)
    assert places["faults", 0, "effect", "error"].value == (3, 21)
    assert places["faults",].key == (1, 1)
    assert places["faults", 0].value == (2, 5)
    assert places[()].value == (1, 1)


def test_crlf_and_a_byte_order_mark(tmp_path: Path) -> None:
    assert load(tmp_path, b"\xef\xbb\xbf" + HEAD.replace("\n", "\r\n").encode())[0].title == "A title"
    assert is_scenario_file(tmp_path / "one.yaml")


# --------------------------------------------- what is no YAML the lab reads


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
)
FAULT = HEAD + "faults:\n  - at: cuMemMap\n    "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + "»title: again\n", "the key 'title' is here twice"),
        (HEAD + "»---\n" + HEAD, "a second document begins here"),
        (HEAD + "faults:\n»\t- at: x\n", "a tab in the indentation"),
        (HEAD + "faults:\n  »\t- at: x\n", "a tab in the indentation"),
        (HEAD + "source: »!!python/object:os.system x\n", "the tag 'python/object:os.system' is not allowed"),
        (HEAD + "source: »!!binary aGk=\n", "the tag 'binary' is not allowed"),
        (HEAD + "workspace: »!mine {}\n", "the tag '!mine' is not allowed"),
        (HEAD + "ranks: »!!int two\n", "'two' is no int"),
        (HEAD + "faults: &a [»*a]\n", "the alias 'a' is inside of what it stands for"),
        (HEAD + "faults: »*b\n", "no anchor is called 'b'"),
        (HEAD + "»1: x\n", "the key '1' is no text"),
        (HEAD + "»true: x\n", "the key 'true' is no text"),
        (HEAD + "»[a]: x\n", "a key must be a text"),
        (HEAD + "workspace:\n  »<<: {a: b}\n", "merge keys (<<) are not part of this format"),
        (HEAD + "budget: {init_s: ».inf}\n", "'.inf' is not a finite number"),
        (HEAD + "budget: {init_s: »1e999}\n", "'1e999' is not a finite number"),
        (HEAD + "budget: {init_s: »" + "9" * 50 + "}\n", "a number of more than 40 characters"),
        (HEAD + "source: a»: b\n", "not YAML: mapping values are not allowed"),
        (HEAD + "faults: " + "[" * 31 + "»[\n", "nested deeper than 32 levels"),
        (HEAD + "source: a»\x1b[31m\n", "the character U+001B cannot be in a YAML file"),
        (HEAD + "source: a»\x00\n", "the character U+0000 cannot be in a YAML file"),
        ("»# nothing\n", "the file is empty"),
        ("--- »~\n", "the file is empty"),
        ("»foo: 1\n", "this is neither a scenario nor a topology file"),
        ("»- faultlab\n", "this is neither a scenario nor a topology file"),
        ("title: x\n»fautlab: 1\n", "unknown key 'fautlab'"),
    ],
)
def test_a_file_that_is_refused_as_a_whole(text: str, message: str, tmp_path: Path, parser: str) -> None:
    whole, line, column = split_mark(text)
    error = refused(tmp_path, whole)
    assert len(errors_of(error)) == 1
    assert str(error).startswith(f"{tmp_path / 'one.yaml'}:{line}:{column}: ")
    assert message in error.message


def test_an_error_shows_its_line_and_a_caret(tmp_path: Path) -> None:
    lines = str(refused(tmp_path, HEAD + "rank: 4\n")).splitlines()
    assert lines[0].endswith("one.yaml:5:1: unknown key 'rank'")
    assert lines[1:] == ["  rank: 4", "  ^", "  did you mean 'ranks'?"]


def test_an_error_writes_nothing_harmful_to_a_terminal(tmp_path: Path) -> None:
    for error in (
        refused(tmp_path, HEAD + "source: a\x1b[31m\n"),
        refused(tmp_path, HEAD + "ran\u202eks: 1\n"),
    ):
        assert all(char.isprintable() or char == "\n" for char in str(error))


def test_an_alias_bomb(tmp_path: Path, parser: str) -> None:
    error = refused(tmp_path, HEAD + BOMB)
    assert error.message == f"more than {limits.YAML_NODES} values"


def test_aliases_do_not_hide_depth(tmp_path: Path, parser: str) -> None:
    deep = "a: &a " + "[" * 20 + "]" * 20 + "\nb: " + "[" * 20 + "*a" + "]" * 20 + "\n"
    assert "nested deeper" in refused(tmp_path, HEAD + deep).message


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? ", "&a [", "!!seq ["])
def test_deep_nesting(opening: str, tmp_path: Path, parser: str) -> None:
    assert "Error" not in str(refused(tmp_path, "faults: " + opening * 100_000))
    assert "nested deeper" in refused(tmp_path, "faultlab:\n  " + "- " * 100_000).message


@pytest.mark.parametrize(
    ("data", "message", "place"),
    [
        ("faultlab: 1\n".encode("utf-16"), "the file is not UTF-8", (1, 1)),
        (b"faultlab: 1\ntitle: caf\xe9\n", "the file is not UTF-8", (2, 11)),
        (bytes(range(128)), "cannot be in a YAML file", (1, 1)),
        (b"", "the file is empty", (1, 1)),
        (b"\n\n", "the file is empty", (1, 1)),
        (b"faultlab: 1\n" + b"#" * limits.FILE_SIZE_BYTES, "the file is larger than", (1, 1)),
    ],
)
def test_bytes_that_are_no_text(
    data: bytes, message: str, place: tuple[int, int], tmp_path: Path, parser: str
) -> None:
    error = refused(tmp_path, data)
    assert message in error.message
    assert (error.line, error.column) == place


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"absent\.yaml: cannot be read: no such file"):
        load_file(tmp_path / "absent.yaml")
    with pytest.raises(ScenarioErrors, match=r"absent\.yaml: cannot be read: no such file"):
        load_paths([tmp_path / "absent.yaml"])


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ScenarioError, match="is not a regular file"):
        load_file(tmp_path / "pipe.yaml")
    assert load_paths([tmp_path]) == []
    assert not is_scenario_file(tmp_path / "pipe.yaml")


# ---------------------------------------------------- mistakes in the form


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("faultlab: »2\ntitle: x\ntopology: pcie-4\nsubject: reference\n", "must be 1, the version", ""),
        ("faultlab: »true\ntitle: x\ntopology: pcie-4\nsubject: reference\n", "must be 1, the version", ""),
        ("faultlab: »1.0\ntitle: x\ntopology: pcie-4\nsubject: reference\n", "must be 1, the version", ""),
        ("»faultlab: 1\ntopology: pcie-4\n", "the keys 'title', 'subject' are missing", ""),
        ("faultlab: 1\ntitle: »''\ntopology: pcie-4\nsubject: reference\n", "'title' is empty", ""),
        (HEAD + "ranks: »true\n", "'ranks' must be a whole number", ""),
        (HEAD + "ranks: »'4'\n", "'ranks' must be a whole number: how many ranks run, not the text '4'", ""),
        (HEAD + "ranks: »4.5\n", "not the number 4.5", ""),
        (HEAD + "ranks: »0\n", "'ranks' must be at least 1", ""),
        (HEAD + "ranks: »200\n", "'ranks' must be at most 128", ""),
        (HEAD + "workspace:»\n", "'workspace' must be a mapping, not nothing", ""),
        (HEAD + "workspace: {dtype: »bf16}\n", "'dtype' must be bfloat16", "did you mean"),
        (HEAD + "workspace: {»creatoin: real}\n", "unknown key 'creatoin'", "did you mean 'creation'?"),
        (HEAD + "workload: [create, »ues]\n", "entry 2 of 'workload' must be a step", "did you mean 'use'?"),
        (HEAD + "workload: [{»uze: {}}]\n", "unknown key 'uze'", "did you mean 'use'?"),
        (HEAD + "workload: [{use: {times: »0}}]\n", "'times' must be at least 1", ""),
        (HEAD + "workload: »[]\n", "'workload' needs at least 1 entries", ""),
        (HEAD + "faults: »{}\n", "'faults' must be a list, not a mapping", ""),
        (HEAD + "faults: [»cuMemMap]\n", "entry 1 of 'faults' must be a mapping", ""),
        (HEAD + "faults: [»{at: cuMemMap}]\n", "the key 'effect' is missing", ""),
        (FAULT + "effect: {»eror: 1}\n", "unknown key 'eror'", "did you mean 'error'?"),
        (FAULT + "effect: {»raise_: OSError}\n", "unknown key 'raise_'", "did you mean 'raise'?"),
        (FAULT + "effect: {error: »[1]}\n", "'error' must be the name of an error code, or its number", ""),
        (FAULT + "effect: {hang: »yes}\n", "'hang' must be true", ""),
        (FAULT + "effect: {hang: »1}\n", "'hang' must be true", ""),
        (FAULT + "effect: {hang: »false}\n", "'hang' must be true", ""),
        (FAULT + "effect: {delay_s: »-1}\n", "'delay_s' must be at least 0", ""),
        (FAULT + "effect: {hang: true}\n    ranks: »frist\n", "'ranks' must be all, first", "mean 'first'?"),
        (FAULT + "effect: {hang: true}\n    ranks: »[]\n", "'ranks' needs at least 1 entries", ""),
        (FAULT + "effect: {hang: true}\n    ranks: [0, »a]\n", "entry 2 of 'ranks' must be a whole", ""),
        (FAULT + "effect: {hang: true}\n    ranks: {»nod: 1}\n", "unknown key 'nod'", "did you mean 'node'?"),
        (FAULT + "effect: {hang: true}\n    ranks: »3\n", "'ranks' must be all, first", ""),
        (FAULT + "effect: {hang: true}\n    calls: »0\n", "'calls' must be at least 1", ""),
        (FAULT + "effect: {hang: true}\n    calls: {»form: 3}\n", "unknown key 'form'", "mean 'from'?"),
        (FAULT + "effect: {hang: true}\n    calls: {chance: »2}\n", "'chance' must be at most 1", ""),
        (
            FAULT + "effect: {hang: true}\n    during: »mnvl\n",
            "'during' must be any",
            "did you mean 'mnnvl'?",
        ),
        (
            FAULT + "effect: {hang: true}\n    phase: »creat\n",
            "'phase' must be any",
            "did you mean 'create'?",
        ),
        (HEAD + "expect: {outcome: »usd}\n", "'outcome' must be crash", "did you mean 'used'?"),
        (HEAD + "expect: {breaks: {no_leak: »{}}}\n", "the key 'url' is missing", ""),
        (HEAD + "expect: {breaks: {no_leak: {url: »x}}}\n", "'url' must be an address", ""),
        (HEAD + "lanes: [»cpu]\n", "entry 1 of 'lanes' must be sim or gpu", ""),
        (HEAD.replace("hgx-h100-8", "»../x"), "'topology' must be a name", ""),
        (HEAD.replace("hgx-h100-8", "»3"), "'topology' must be a name, {preset", "not the number 3"),
        (HEAD.replace("reference", "»[a]"), "'subject' must be a name, or {name", ""),
        (HEAD.replace("reference", "{»nme: vllm}"), "unknown key 'nme'", "did you mean 'name'?"),
    ],
)
def test_mistakes_in_the_form(text: str, message: str, hint: str, tmp_path: Path) -> None:
    check_one_mistake(text, message, hint, tmp_path)


def check_one_mistake(text: str, message: str, hint: str, tmp_path: Path) -> None:
    """One error, at the marked place, with these words."""
    whole, line, column = split_mark(text)
    error = refused(tmp_path, whole)
    assert len(errors_of(error)) == 1, str(error)
    assert (error.line, error.column) == (line, column), str(error)
    assert message in error.message
    assert hint in str(error)


# -------------------------------------------------- mistakes in the meaning


INLINE = (
    "{gpus: {count: 4, model: X, memory_gib: 8, compute_capability: 9.0}, links: {kind: nvswitch},"
    "\n  says: {}, does: {multicast: true}, nodes: 2}"
)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (HEAD + "ranks: »9\n", "9 ranks need a GPU each, and hgx-h100-8 has 8 GPUs", ""),
        (HEAD.replace("reference", "»refrence"), "no subject is called 'refrence'", "mean 'reference'?"),
        (HEAD.replace("reference", "{name: »vlm}"), "no subject is called 'vlm'", "mean 'vllm'?"),
        (HEAD.replace("reference", "»canary:no_leek"), "no invariant is called 'no_leek'", "mean 'no_leak'?"),
        (HEAD.replace("hgx-h100-8", "»hgx-h100"), "no topology is called 'hgx-h100'", "mean 'hgx-h100-8'?"),
        (HEAD.replace("hgx-h100-8", "»probe-says-yes"), "is an overlay, not a topology", "lay it over one"),
        (HEAD.replace("hgx-h100-8", "{preset: »pci-4}"), "no topology is called", "mean 'pcie-4'?"),
        (
            HEAD.replace("hgx-h100-8", "{preset: pcie-4, overlay: »probe-says-ye}"),
            "no overlay is called",
            "mean 'probe-says-yes'?",
        ),
        (
            HEAD.replace("hgx-h100-8", "{preset: pcie-4, overlay: [probe-says-yes, »pcie-4]}"),
            "is a topology, not an overlay",
            "",
        ),
        (
            HEAD.replace("hgx-h100-8", INLINE.replace("nvswitch}", "bridge, islands: [[0, »9]]}")),
            "GPU 9 is outside",
            "",
        ),
        (
            HEAD.replace("hgx-h100-8", INLINE.replace("says: {}", "says: {attributes: {»MULTICAST: 1}}")),
            "no attribute is called 'MULTICAST'",
            "did you mean 'MULTICAST_SUPPORTED'?",
        ),
        (
            HEAD.replace("hgx-h100-8", "»" + INLINE.replace("nodes: 2", "nodes: 40")),
            "inline has 160 GPUs, more than 128 ranks can run",
            "ranks: N",
        ),
        (
            HEAD + "faults: [{at: »cuMemCraete, effect: {hang: true}}]\n",
            "no site is called",
            "'cuMemCreate'?",
        ),
        (
            HEAD + "faults: [{at: »cuMemMap(X), effect: {hang: true}}]\n",
            "takes no argument",
            "write cuMemMap",
        ),
        (
            HEAD + "faults: [{at: »cuDeviceGetAttribute(MULTICAST), effect: {value: 0}}]\n",
            "no attribute is called 'MULTICAST'",
            "did you mean 'MULTICAST_SUPPORTED'?",
        ),
        (
            FAULT + "effect: »{}\n",
            "the effect has no kind",
            "one of error, raise, delay_s, hang, kill or poison",
        ),
        (FAULT + "effect: »{error: }\n", "the effect has no kind", ""),
        (
            FAULT + "effect: {error: 1, »hang: true}\n",
            "one kind, here are error and hang",
            "a fault for each",
        ),
        (FAULT + "effect: {»value: 0}\n", "value is not possible at cuMemMap", "possible: error, raise"),
        (FAULT + "effect: {»lose: true}\n", "lose is not possible at cuMemMap", "possible: error"),
        (FAULT + "effect: {error: »CUDA_ERROR_UNKNOWN}\n", "cuMemMap cannot return", "it can return"),
        (FAULT + "effect: {error: »999}\n", "cuMemMap cannot return CUDA_ERROR_UNKNOWN", "it can return"),
        (FAULT + "effect: {error: »123456}\n", "no code has the number 123456", "it can return"),
        (FAULT + "effect: {error: »NOT_SUPPORTED}\n", "no code is called", "'CUDA_ERROR_NOT_SUPPORTED'?"),
        (FAULT + "effect: {raise: »KeyboardInterrupt}\n", "cannot be raised by a fault", "RuntimeError"),
        (FAULT + "effect: {raise: »RuntimeEror}\n", "no built-in exception", "mean 'RuntimeError'?"),
        (FAULT + "effect: {poison: »CUDA_ERROR_INVALID_VALUE}\n", "does not poison a context", "these do"),
        (FAULT + "effect: {error: 1, poisons: »CUDA_ERROR_UNKNOWN}\n", "does not poison", "these do"),
        (
            FAULT + "effect: {hang: true, »poisons: CUDA_ERROR_LAUNCH_FAILED}\n",
            "belongs to error or raise",
            "",
        ),
        (FAULT + "effect: {error: 1, »message: x}\n", "a message belongs to raise, not to error", ""),
        (FAULT + "effect: {hang: true, »after_s: 1}\n", "after_s means nothing for hang", ""),
        (
            HEAD
            + "faults: [{at: comm.barrier, effect: {raise: OSError, »poisons: CUDA_ERROR_LAUNCH_FAILED}}]\n",
            "comm.barrier cannot poison a context",
            "",
        ),
        (HEAD + "faults: [{at: workspace.mc_ptr, effect: {value: »null pointer}}]\n", "is a number", ""),
        (HEAD + "faults: [{at: workspace.mc_ptr, effect: {value: »-1}}]\n", "a whole number, at least 0", ""),
        (HEAD + "faults: [{at: workspace.mc_ptr, effect: {value: 0, »when: after}}]\n", "means nothing", ""),
        (FAULT + "effect: {hang: true}\n    ranks: [»8]\n", "rank 8 is outside the topology", ""),
        (
            HEAD + "ranks: 2\nfaults: [{at: cuMemMap, effect: {hang: true}, ranks: [0, »2]}]\n",
            "does not run",
            "",
        ),
        (FAULT + "effect: {hang: true}\n    ranks: [1, »1]\n", "rank 1 is here twice", ""),
        (FAULT + "effect: {hang: true}\n    ranks: {node: »1}\n", "node 1 is outside the topology", ""),
        (FAULT + "effect: {hang: true}\n    ranks: {random: »9}\n", "9 ranks cannot be drawn from 8", ""),
        (
            HEAD + "ranks: 1\nfaults: [{at: cuMemMap, effect: {hang: true}, ranks: »all-but-first}]\n",
            "this is no rank of the 1 that run",
            "",
        ),
        (
            HEAD.replace("hgx-h100-8", INLINE)
            + "ranks: 4\nfaults: [{at: cuMemMap, effect: {hang: true}, ranks: »{node: 1}}]\n",
            "this is no rank of the 4 that run",
            "",
        ),
        (HEAD + "workload: [create, exit, »use]\n", "no step runs after exit", ""),
        (HEAD + "workload: [{capture: [»exit]}]\n", "exit cannot be captured", "holds create and use"),
        (
            HEAD + "workload: [{capture: [use, »destroy]}]\n",
            "destroy cannot be captured",
            "until it is dropped",
        ),
        (
            HEAD + "workload: [{capture: [»collective]}]\n",
            "collective cannot be captured",
            "waits on the host",
        ),
        (HEAD + "workload: [{capture: [create, use]}, destroy, exit, »{capture: [use]}]\n", "after exit", ""),
        (HEAD + "workload: [{capture: [»{capture: [use]}]}]\n", "a capture inside a capture", ""),
        (HEAD + "expect: {breaks: {»no_leek: {url: https://a.b}}}\n", "no invariant is called", "'no_leak'?"),
        (
            HEAD + "expect: {breaks: {no_leak: {url: https://a.b, subjects: »vlm<0.3}}}\n",
            "no subject is called 'vlm'",
            "mean 'vllm'?",
        ),
        (
            HEAD + "expect: {breaks: {no_leak: {url: https://a.b, subjects: »'<0.3'}}}\n",
            "names no subject",
            "subjects with versions",
        ),
        (HEAD + "lanes: [sim, »sim]\n", "the lane 'sim' is here twice", ""),
        (HEAD + "budget: {init_s: »700}\n", "init_s is longer than the whole run (run_s: 600)", ""),
        (HEAD + "workspace: {backend: mnnvl, »preferred: trtllm}\n", "preferred says nothing beside", ""),
    ],
)
def test_mistakes_in_the_meaning(text: str, message: str, hint: str, tmp_path: Path) -> None:
    check_one_mistake(text, message, hint, tmp_path)


def test_all_mistakes_are_reported_together_and_in_order(tmp_path: Path) -> None:
    text = (
        HEAD
        + "rank: 4\nfaults:\n  - at: cuMemCraete\n    effect: {eror: 1}\nexpect: {outcome: usd}\nlanes: [cpu]\n"
    )
    error = refused(tmp_path, text)
    assert [each.line for each in errors_of(error)] == [5, 7, 8, 9, 10]


def test_too_many_mistakes_are_counted(tmp_path: Path) -> None:
    text = HEAD + "faults:\n" + "  - {at: x, effect: {hang: true}}\n" * 40
    errors = errors_of(refused(tmp_path, text))
    assert len(errors) == 26
    assert errors[-1].message == "and 15 more mistakes"


def test_a_wrong_topology_file_is_reported_at_its_own_place(tmp_path: Path) -> None:
    write(tmp_path, "topology-file: 1\nname: mine\ntitel: x\n", "mine.yaml")
    errors = errors_of(refused(tmp_path, HEAD.replace("hgx-h100-8", "mine")))
    assert {Path(each.path).name for each in errors} == {"mine.yaml"}


def test_loading_imports_neither_subjects_nor_torch(tmp_path: Path) -> None:
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    path = write(tmp_path, HEAD.replace("reference", "trap:Thing"))
    code = (
        "import sys; from pathlib import Path; from faultlab.scenario.load import load_paths;"
        f"assert len(load_paths([Path({str(path)!r})])) == 1;"
        "assert not {'torch', 'flashinfer', 'trap', 'cuda'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{tmp_path}"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)


# -------------------------------------------------------------- many files


def test_folders_are_walked_in_order(tmp_path: Path) -> None:
    write(tmp_path / "b", HEAD, "two.yml")
    write(tmp_path / "a", HEAD, "three.yaml")
    write(tmp_path, HEAD, "one.yaml")
    write(tmp_path / ".hidden", HEAD, "four.yaml")
    write(tmp_path, HEAD, ".five.yaml")
    write(tmp_path, HEAD, "six.txt")
    write(tmp_path, "name: workflow\non: push\n", "ci.yaml")
    write(tmp_path, "name: [broken\n", "broken.yaml")
    write(tmp_path, b"\xff\xfe\x00", "junk.yaml")
    assert [scenario.id for scenario in load_paths([tmp_path])] == ["one", "three", "two"]
    assert [scenario.id for scenario in load_paths([tmp_path / "six.txt"])] == ["six"]


def test_a_file_is_loaded_once(tmp_path: Path) -> None:
    path = write(tmp_path, HEAD)
    assert len(load_paths([path, tmp_path, path, tmp_path / "." / "one.yaml"])) == 1


def test_topology_files_are_passed_over_and_checked(tmp_path: Path) -> None:
    text = (REPOSITORY / "scenarios/topologies/pcie-4.yaml").read_text()
    topology = write(tmp_path, text, "pcie-4.yaml")
    write(tmp_path, HEAD)
    assert len(load_paths([tmp_path])) == 1
    assert load_paths([topology]) == []
    assert load_file(topology) == []
    assert check_paths([tmp_path]) == (1, 1)
    topology.write_text(text.replace("links", "link"))
    assert len(load_paths([tmp_path])) == 1
    with pytest.raises(ScenarioErrors, match="unknown key 'link'"):
        check_paths([tmp_path])


@pytest.mark.parametrize("text", ["faultlab:\n  - [\n", "fautlab: 1\n", "faultlab: 1\n"])
def test_a_broken_scenario_in_a_folder_is_an_error(text: str, tmp_path: Path) -> None:
    write(tmp_path, text)
    write(tmp_path, HEAD, "right.yaml")
    with pytest.raises(ScenarioErrors, match=r"one\.yaml:"):
        load_paths([tmp_path])


def test_the_mistakes_of_all_files_are_reported(tmp_path: Path) -> None:
    for name in ("a.yaml", "b.yaml"):
        write(tmp_path, HEAD + "rank: 1\n", name)
    with pytest.raises(ScenarioErrors) as caught:
        load_paths([tmp_path, tmp_path / "absent.yaml"])
    assert [Path(each.path).name for each in caught.value.errors] == ["a.yaml", "absent.yaml", "b.yaml"]


def test_a_named_file_must_be_a_scenario_or_a_topology(tmp_path: Path) -> None:
    path = write(tmp_path, "name: workflow\n")
    assert load_paths([tmp_path]) == []
    with pytest.raises(ScenarioErrors, match="neither a scenario nor a topology file"):
        load_paths([path])


def test_the_same_id_gets_the_folders_name(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        write(tmp_path / folder, HEAD + "matrix: {ranks: [2, 4]}\n")
    write(tmp_path / "b", HEAD, "other.yaml")
    ids = [scenario.id for scenario in load_paths([tmp_path])]
    assert ids == ["a/one[ranks=2]", "a/one[ranks=4]", "b/one[ranks=2]", "b/one[ranks=4]", "other"]


def test_ids_that_stay_the_same_are_an_error(tmp_path: Path) -> None:
    for folder in ("x/a", "y/a"):
        write(tmp_path / folder, HEAD)
    with pytest.raises(ScenarioErrors, match="two scenarios have the id 'a/one'"):
        load_paths([tmp_path])


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "outside", HEAD)
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link.yaml").symlink_to(tmp_path / "outside" / "one.yaml")
    with pytest.raises(ScenarioErrors, match="a link that leads out of its folder"):
        load_paths([inside])
    assert len(load_paths([inside / "link.yaml"])) == 1


def test_an_empty_folder_has_no_scenarios(tmp_path: Path) -> None:
    assert load_paths([tmp_path]) == []
    assert check_paths([]) == (0, 0)


def test_odd_file_names_make_plain_ids(tmp_path: Path) -> None:
    assert load_file(write(tmp_path, HEAD, "my scenario (1).yaml"))[0].id == "my-scenario-1"
    assert load_file(write(tmp_path, HEAD, "…yaml"))[0].id == "yaml"


def test_the_repositorys_own_files_are_right() -> None:
    scenarios, topologies = check_paths([REPOSITORY / "scenarios"])
    assert scenarios > 100
    assert topologies >= 5


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (HEAD.encode(), True),
        (b"---\nfaultlab: 1\n", True),
        (b"--- {faultlab: 1}\n", False),
        (b"# x\n'faultlab': 1\n", True),
        (b'{"faultlab": 1}', True),
        (b"title: [\nfaultlab: \xff\n", True),
        (b"faultlab:\n" + b"#" * (limits.FILE_SIZE_BYTES + 1), True),
        (b"x:\n  faultlab: 1\n", False),
        (b"topology-file: 1\n", False),
        (b"faultlabs: 1\n", False),
        (b"", False),
        (b"\x00\xff", False),
    ],
)
def test_what_is_a_scenario_file(data: bytes, answer: bool, tmp_path: Path) -> None:
    assert is_scenario_file(write(tmp_path, data)) is answer
    assert not is_scenario_file(tmp_path)
    assert not is_scenario_file(tmp_path / "absent.yaml")


def test_the_schema_knows_the_keys_and_the_words() -> None:
    schema = json_schema()
    json.dumps(schema)
    assert schema["additionalProperties"] is False
    assert set(schema["required"]) == {"faultlab", "title", "topology", "subject"}
    assert "cuMulticastBindMem" in schema["$defs"]["Fault"]["properties"]["at"]["enum"]
    assert {"raise", "error", "hang"} <= set(schema["$defs"]["Effect"]["properties"])
    assert schema["$defs"]["Expect"]["properties"]["breaks"]["propertyNames"] == {"enum": list(INVARIANTS)}


# ------------------------------------------------------- whatever is in a file


SEEDS = [path.read_text() for path in sorted((REPOSITORY / "scenarios" / "seed").glob("*.yaml"))]
WORDS = st.sampled_from(
    [
        *(
            "faultlab",
            "title",
            "topology",
            "ranks",
            "subject",
            "workload",
            "faults",
            "expect",
            "budget",
            "lanes",
        ),
        *(
            "matrix",
            "case",
            "exclude",
            "at",
            "effect",
            "error",
            "raise",
            "value",
            "hang",
            "calls",
            "from",
            "node",
        ),
        *(
            "random",
            "seed",
            "preset",
            "overlay",
            "gpus",
            "links",
            "says",
            "does",
            "faults.0.at",
            "breaks",
            "use",
        ),
        *(
            "capture",
            "poisons",
            "workspace.creation",
            "pcie-4",
            "reference",
            "first",
            "create",
            "no_leak",
            "raise_",
        ),
        *list(SITES)[::9],
    ]
)
SCALARS = st.one_of(
    WORDS,
    st.integers(-2, 9),
    st.booleans(),
    st.none(),
    st.text(max_size=8),
    st.floats(-1, 1e6),
    st.just(10**45),
)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=25,
)


def error_of(path: Path) -> ScenarioError | None:
    """What loading the file raises; anything but a ScenarioError fails the test."""
    try:
        assert all(isinstance(scenario, Scenario) for scenario in load_file(path))
    except ScenarioError as error:
        return error
    return None


def only_scenario_errors(path: Path) -> None:
    """Load what is in the file: scenarios, or an error that a person can read."""
    is_scenario_file(path)
    error = error_of(path)
    for each in errors_of(error) if error is not None else []:
        assert each.message
        assert each.path
        assert "pydantic" not in str(each)
        assert "Input should" not in str(each)


@FUZZ
@given(st.binary(max_size=200))
def test_random_bytes(tmp_path: Path, data: bytes) -> None:
    only_scenario_errors(write(tmp_path, data))
    only_scenario_errors(write(tmp_path, HEAD.encode() + data))


@FUZZ
@given(st.sampled_from(SEEDS), st.data())
def test_seeds_with_a_piece_changed(tmp_path: Path, text: str, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.integers(0, 12)))
        piece = data.draw(st.text(alphabet="[]{}:,-&*!|>'\"#%@`\t\n ~?0aé", max_size=6) | WORDS)
        text = text[:start] + piece + text[end:]
    only_scenario_errors(write(tmp_path, text))


@FUZZ
@given(st.dictionaries(WORDS, TREES, max_size=6))
def test_random_trees_of_known_words(tmp_path: Path, tree: dict[str, Any]) -> None:
    whole = {"faultlab": 1, "title": "t", "topology": "pcie-4", "subject": "reference", **tree}
    only_scenario_errors(write(tmp_path, json.dumps(whole)))


def replaced(tree: Any, value: Any, steps: Iterator[int]) -> Any:
    """The tree with the value in one place, chosen by the steps."""
    step = next(steps, 0)
    if isinstance(tree, dict) and tree and step:
        key = sorted(tree)[step % len(tree)]
        return {**tree, key: replaced(tree[key], value, steps)}
    if isinstance(tree, list) and tree and step:
        index = step % len(tree)
        return [*tree[:index], replaced(tree[index], value, steps), *tree[index + 1 :]]
    return value


@FUZZ
@given(st.sampled_from(SEEDS), TREES, st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_seeds_with_a_value_changed(tmp_path: Path, text: str, value: Any, steps: list[int]) -> None:
    tree = replaced(yaml.safe_load(text), value, iter(steps))
    only_scenario_errors(write(tmp_path, json.dumps(tree)))
