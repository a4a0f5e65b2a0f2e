"""From a folder to facts: the order of events, what is left out, and folders that hold no run."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from faultlab.errors import LabError
from faultlab.judge import judge
from faultlab.judge.facts import Facts
from faultlab.judge.reading import read_facts
from faultlab.report.results import result_object
from tests.unit.judging import Run, broken, clean, fault, thing


def facts(run: Run) -> Facts:
    return read_facts(run.write())


def test_the_same_folder_always_gets_the_same_judgement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = clean(Run(tmp_path)).write()
    first = result_object(judge(folder), folder)
    monkeypatch.setattr("time.time", lambda: 0.0)
    monkeypatch.setattr(os, "environ", {})
    assert result_object(judge(folder), folder) == first


def test_events_are_taken_by_their_numbers_not_by_their_lines(tmp_path: Path) -> None:
    """Two threads of a rank write through connections of their own."""
    folder = clean(Run(tmp_path)).write()
    expected = result_object(judge(folder), folder)
    path = folder / "rank0.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    random.Random(7).shuffle(lines)
    path.write_bytes(b"".join(lines))
    assert result_object(judge(folder), folder) == expected


def test_a_half_written_last_line_is_left_out(tmp_path: Path) -> None:
    folder = clean(Run(tmp_path)).write()
    with (folder / "rank0.jsonl").open("ab") as file:
        file.write(b'{"v":1,"n":99,"kin')
    assert broken(judge(folder)) == set()


def test_a_kind_that_nobody_asks_for_is_passed_over(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run[0].emit("log", level="INFO", logger="x", message="hello")
    run[0].emit("something-new", field=1)
    assert judge(clean(run).write()).verdict.word == "pass"


def test_nothing_counts_after_the_scenario_ended_a_rank(tmp_path: Path) -> None:
    run = Run(tmp_path, faults=[fault("cuMemCreate", [1], poison="CUDA_ERROR_LAUNCH_FAILED")])
    clean(run)
    rank = run[1]
    rank.strike(0, rank.enter("cuMemCreate"), "cuMemCreate", "poison")
    rank.sticky("cuMemCreate", injected=True)
    rank.call("cuMemFree")
    found = facts(run).ranks[1]
    assert found.ended is not None
    assert found.ended.title == "poisoned by the scenario at cuMemCreate"
    assert [call.site for call in found.calls][-1] == "cuMemCreate"
    assert found.calls[-1].ended is None


def test_a_helper_thread_that_the_scenario_hangs_does_not_end_its_rank(tmp_path: Path) -> None:
    run = Run(tmp_path, faults=[fault("fd.recv", hang=True)])
    run[0].thread = "server"
    run[0].strike(0, run[0].enter("fd.recv"), "fd.recv", "hang")
    run[0].thread = "main"
    assert facts(clean(run)).ranks[0].ended is None


def test_what_a_failed_call_says_it_made_is_not_believed(tmp_path: Path) -> None:
    """A call that was never made repeats what the one before it made."""
    run = Run(tmp_path)
    run[0].call("cuMemCreate", result="CUDA_ERROR_UNKNOWN", made=[thing("handle", "h1")])
    assert facts(run).ranks[0].calls[-1].made == ()


def test_steps_after_the_workload_come_after_every_step(tmp_path: Path) -> None:
    found = facts(clean(Run(tmp_path))).ranks[0]
    assert [ledger.moment.step for ledger in found.ledgers] == [-1, 4]
    assert [step.title for step in found.steps] == ["create #1", "use #1", "destroy #1", "exit #1"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.json", None),
        ("run.json", "{"),
        ("run.json", '{"lane": "sim"}'),
        ("run.json", "[]"),
        ("rank0.jsonl", '{"v":1,"n":0}\n'),
        ("rank0.jsonl", '{"v":99,"n":0,"kind":"start","t":0}\n'),
        ("rank0.jsonl", "[]\n"),
        ("rank0.jsonl", '{"v":1,"n":0,"t":0,"kind":"step-end","step":0,"result":{"returned":"done"}}\n'),
        ("supervisor.jsonl", '{"v":1,"n":0,"t":0,"kind":"rank-exit","rank":9,"exit":0,"signal":null}\n'),
    ],
)
def test_a_folder_without_a_readable_run_is_one_clear_error(
    tmp_path: Path, name: str, text: str | None
) -> None:
    folder = clean(Run(tmp_path)).write()
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)
    with pytest.raises(LabError, match="not a run that can be judged"):
        judge(folder)


def test_a_plan_without_what_the_judge_does_not_need_is_enough(tmp_path: Path) -> None:
    folder = clean(Run(tmp_path)).write()
    plan = json.loads((folder / "run.json").read_text())
    del plan["versions"], plan["overrides"]
    (folder / "run.json").write_text(json.dumps(plan))
    assert judge(folder).verdict.word == "pass"
