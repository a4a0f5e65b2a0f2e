"""The objects of results.jsonl: their keys, what is in them, and the command that runs one again."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from faultlab.report.rejudge import judge_all
from faultlab.report.results import KEYS, result_object, skipped_result
from faultlab.scenario.models import Subject
from tests.unit.judging import URL, Run, clean, expecting, fault, scenario, thing, wait

#: What the design fixes, and the reason besides.
DESIGN = {
    "id",
    "file",
    "line",
    "lane",
    "subject",
    "verdict",
    "outcome",
    "path",
    "invariants",
    "faults",
    "ranks",
    "seconds",
    "machine_s",
    "replay",
}


def result(run: Run) -> dict[str, Any]:
    made = result_object(run.judge(), run.folder)
    assert json.loads(json.dumps(made)) == made, "plain JSON"
    return made


def test_a_result_has_the_keys_of_the_design_and_the_reason(tmp_path: Path) -> None:
    made = result(clean(Run(tmp_path)))
    assert set(made) == DESIGN | {"reason"} == set(KEYS)
    assert made["id"] == "case-sim"
    assert (made["file"], made["line"], made["lane"]) == ("some/case.yaml", 1, "sim")
    assert (made["verdict"], made["outcome"], made["path"]) == ("pass", "used", "mnnvl")
    assert (made["seconds"], made["machine_s"]) == (0.31, 1.25)
    assert made["reason"] == "used, as expected\ntitle: A case"
    assert made["invariants"]["no_leak"] == {"state": "held", "reason": ""}
    assert len(made["invariants"]) == 15


def test_a_skipped_result_has_the_same_keys() -> None:
    made = skipped_result(
        scenario(faults=[fault("cuMemMap", [1], hang=True)]), "gpu", "no GPU on this machine"
    )
    assert tuple(made) == KEYS
    assert (made["id"], made["verdict"], made["reason"]) == ("case-gpu", "skipped", "no GPU on this machine")
    assert (made["outcome"], made["path"], made["ranks"], made["invariants"]) == (None, None, [], {})
    assert made["faults"] == [{"at": "cuMemMap", "ranks": [1], "fired": {"1": 0}}]


def test_faults_say_how_often_they_fired_on_each_of_their_ranks(tmp_path: Path) -> None:
    faults = [fault("cuMemMap", "all-but-first", error="CUDA_ERROR_UNKNOWN"), fault("cuMemCreate", kill=True)]
    run = Run(tmp_path, ranks=3, faults=faults)
    for _ in range(2):
        run[2].struck(0, "cuMemMap", "error")
    made = result(clean(run))
    assert made["faults"] == [
        {"at": "cuMemMap", "ranks": [1, 2], "fired": {"1": 0, "2": 2}},
        {"at": "cuMemCreate", "ranks": [0, 1, 2], "fired": {"0": 0, "1": 0, "2": 0}},
    ]


def test_ranks_say_how_they_ended_and_on_what_they_were_blocked(tmp_path: Path) -> None:
    run = Run(tmp_path, faults=[fault("cuMemCreate", [1], kill=True)])
    run[0].begin("create")
    run[0].enter("cuMemMap")
    run[1].begin("create")
    run[1].strike(0, run[1].enter("cuMemCreate"), "cuMemCreate", "kill")
    run[1].ends(None, "SIGKILL", expected=False)
    run.hang(wait(0, "cuMemMap", 1, text="1 of 2 devices"))
    assert result(run)["ranks"] == [
        {
            "rank": 0,
            "outcome": "hang",
            "exit": "SIGKILL",
            "last_site": "cuMemMap",
            "blocked_on": {
                "site": "cuMemMap",
                "kind": "multicast",
                "waits_for": [1],
                "text": "1 of 2 devices",
                "since": 0.25,
            },
        },
        {"rank": 1, "outcome": "crash", "exit": "SIGKILL", "last_site": "cuMemCreate", "blocked_on": None},
    ]


def test_without_the_supervisors_word_the_last_call_is_the_last_site(tmp_path: Path) -> None:
    run = clean(Run(tmp_path))
    assert run[0].exit is not None
    run[0].exit["last_site"] = ""
    run[1].exit["last_site"] = "cuMemFree"  # type: ignore[index]
    run[0].events = [event for event in run[0].events if event["kind"] != "leave"]
    assert [rank["last_site"] for rank in result(run)["ranks"]] == ["workspace.destroy", "cuMemFree"]


def test_a_rank_that_ended_well_has_its_status(tmp_path: Path) -> None:
    assert [rank["exit"] for rank in result(clean(Run(tmp_path)))["ranks"]] == [0, 0]


def test_the_reason_answers_first_and_then_names_what_differs(tmp_path: Path) -> None:
    run = Run(tmp_path, expect=expecting(breaks={"comms_alive": {"url": URL}}))
    for rank in run:
        rank.create(made=[thing("handle", "h1", 1)])
        rank.use()
        rank.destroy()
        rank.finish()
    lines = result(run)["reason"].splitlines()
    assert lines[0].startswith("no_leak: rank 0: 1 handle")
    assert lines[1:] == ["title: A case", "unexpected: no_leak", f"missing: comms_alive ({URL})"]


def test_the_replay_is_one_command_that_a_shell_takes_apart_again(tmp_path: Path) -> None:
    run = clean(Run(tmp_path, id="case[ranks=2,a=b]", path="my dir/case.yaml"))
    assert result(run)["replay"] == "faultlab run 'my dir/case.yaml' -k 'case[ranks=2,a=b]-sim' --lane sim"


def test_the_replay_repeats_a_subject_of_the_command_line(tmp_path: Path) -> None:
    named = Subject(name="my.module:Subject")
    run = clean(Run(tmp_path, subject=named, overrides={"subject": named.name}))
    words = shlex.split(result(run)["replay"])
    assert words[-2:] == ["--subject", "my.module:Subject"]
    assert skipped_result(scenario(), "sim", "why", {"subject": "x"})["replay"].endswith("--subject x")


def test_a_folder_of_kept_runs_is_judged_again(tmp_path: Path) -> None:
    clean(Run(tmp_path / "b")).write()
    clean(Run(tmp_path / "a"), "trtllm").write()
    assert [made["outcome"] for made in judge_all(tmp_path)] == ["fallback", "used"]
