"""Results as text: lines, blocks, summaries and exit codes, in 80 columns and without colour."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from faultlab.report import text
from faultlab.report.results import result_object, skipped_result
from tests.unit.judging import URL, Run, clean, error, expecting, fault, scenario, thing, wait


def result(run: Run) -> dict[str, Any]:
    return result_object(run.judge(), run.folder)


def told(*results: dict[str, Any], seconds: float = 0.0, colour: bool = False) -> str:
    """What a console shows of some results and their summary."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=colour, highlight=False, soft_wrap=True, width=80)
    for each in results:
        text.print_result(console, each)
    text.print_summary(console, list(results), seconds)
    return out.getvalue()


def verdicts(*words: str, file: str = "a.yaml") -> list[dict[str, Any]]:
    return [{**skipped_result(scenario(), "sim", "why"), "verdict": word, "file": file} for word in words]


def hung(tmp_path: Path) -> Run:
    run = Run(tmp_path, id="case[ranks=2]", title="A title with [brackets] that are no markup")
    run[0].begin("create")
    run[1].create_raises(error())
    run.hang(
        wait(0, "cuMemMap", 1, text="cuMemMap of the multicast object waits for 1 of 2 devices to be added"),
        wait(1, "cuMulticastAddDevice", kind="meet", text="has finished and waits for the others"),
    )
    return run


# ----------------------------------------------------------------- one result


def test_a_pass_is_one_line(tmp_path: Path) -> None:
    made = result(clean(Run(tmp_path, id="case[ranks=2]"), "trtllm"))
    assert told(made).splitlines()[0] == "PASS  case[ranks=2]-sim  fallback/trtllm  0.31 s"
    assert len(told(made).split("\n\n")[0].splitlines()) == 1


def test_a_skipped_scenario_is_one_line_with_its_reason() -> None:
    made = skipped_result(scenario(), "gpu", "no GPU on this machine")
    assert told(made).splitlines()[0] == "SKIP  case-gpu  no GPU on this machine"


def test_a_failure_says_the_cause_first_and_the_command_last(tmp_path: Path) -> None:
    lines = told(result(hung(tmp_path))).split("\n\n")[0].splitlines()
    assert lines == [
        "FAIL  case[ranks=2]-sim  hang/-  0.31 s",
        "      bounded_init: rank 0 never left create #1: it waits in cuMemMap for rank 1",
        "        since 0.25 s, and rank 1 has finished and waits for the others",
        "      A title with [brackets] that are no markup",
        "      who waits for whom:",
        "        rank 0  cuMemMap  for 1  since 0.25 s",
        "          cuMemMap of the multicast object waits for 1 of 2 devices to be added",
        "        rank 1  -         for -  since 0.25 s",
        "          has finished and waits for the others",
        "      again: faultlab run some/case.yaml -k 'case[ranks=2]-sim' --lane sim",
    ]
    assert max(len(line) for line in lines) <= 80


def test_a_person_who_sees_nothing_else_reads_the_cause_on_the_first_line(tmp_path: Path) -> None:
    lines = text.render_result(result(hung(tmp_path))).splitlines()
    assert lines[0].startswith("FAIL: bounded_init: rank 0 never left create #1")
    assert lines[1] == "FAIL  case[ranks=2]-sim  hang/-  0.31 s"
    assert lines[-1].strip().startswith("again: faultlab run")
    assert sum("never left create #1" in line for line in lines) == 1


def test_expected_unexpected_and_missing_breaks_are_told_apart(tmp_path: Path) -> None:
    known = {"no_leak": {"url": URL}, "comms_alive": {"url": URL}}
    run = Run(tmp_path, expect=expecting(breaks=known))
    for rank in run:
        rank.create(made=[thing("handle", "h1", 1)])
        rank.use(off=1.0)
        rank.destroy()
        rank.finish()
    shown = told(result(run))
    assert "      no_leak (expected): rank 0: 1 handle" in shown
    assert "      correct_result: rank 0: all-reduce 1" in shown
    assert f"      not broken, though expected: comms_alive ({URL})" in shown


def test_an_unknown_run_says_so_and_which_fault_never_fired(tmp_path: Path) -> None:
    made = result(clean(Run(tmp_path, faults=[fault("cuMemMap", error="CUDA_ERROR_UNKNOWN")])))
    assert told(made).startswith(
        "UNKNOWN  case-sim  used/mnnvl  0.31 s\n      fault 0 at cuMemMap never fired on ranks 0 and 1\n"
    )
    assert text.render_result(made).startswith("UNKNOWN: fault 0 at cuMemMap never fired")


def test_a_failure_names_the_optional_faults_that_stayed_away(tmp_path: Path) -> None:
    away = fault("cuMemMap", optional=True, error="CUDA_ERROR_UNKNOWN")
    there = fault("cuMemCreate", error="CUDA_ERROR_UNKNOWN")
    run = Run(tmp_path, faults=[away, there], expect=expecting(outcome="fallback"))
    run[0].struck(1, "cuMemCreate", "error")
    shown = told(result(clean(run)))
    assert "      the fault at cuMemMap never fired\n" in shown
    assert "the fault at cuMemCreate" not in shown


def test_few_peers_are_named(tmp_path: Path) -> None:
    run = Run(tmp_path, ranks=4)
    run[0].begin("create")
    run.hang(wait(0, "comm.allgather", 1, 2, 3, kind="collective"))
    assert "rank 0  comm.allgather  for 1, 2, 3  since 0.25 s" in told(result(run))


def test_many_ranks_stay_in_80_columns(tmp_path: Path) -> None:
    run = Run(tmp_path, ranks=8)
    for rank in run:
        rank.begin("create")
    others = range(8)
    run.hang(
        *(wait(n, "comm.allgather", *(set(others) - {n}), kind="collective", text="x " * 60) for n in others)
    )
    shown = told(result(run))
    assert "for 7 ranks" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_colour_changes_no_word(tmp_path: Path) -> None:
    import re

    made = result(hung(tmp_path))
    coloured = told(made, colour=True)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == told(made)


# ----------------------------------------------------------------- the summary


def test_the_summary_counts_and_says_how_fast(tmp_path: Path) -> None:
    results = verdicts(*["pass"] * 34, "fail", "skipped")
    lines = [line for _, line in text.summary_lines(results, 12.3)]
    assert lines[-1] == "36 scenarios: 34 passed, 1 failed, 1 skipped in 12.3 s (2.8 a second)"


def test_without_a_clock_there_is_no_speed() -> None:
    assert [line for _, line in text.summary_lines(verdicts("unknown"), 0.0)][-1] == "1 scenario: 1 unknown"


def test_nothing_selected_is_said() -> None:
    assert [line for _, line in text.summary_lines([], 0.0)][-1] == "0 scenarios: nothing ran"


def test_several_files_get_a_table_without_the_folder_they_share() -> None:
    results = [
        *verdicts("pass", "pass", file="scenarios/seed/b.yaml"),
        *verdicts("fail", "skipped", file="scenarios/more/a.yaml"),
    ]
    lines = [line for _, line in text.summary_lines(results, 0.0)]
    assert lines == [
        "",
        "file          passed   failed  skipped",
        "more/a.yaml        -        1        1",
        "seed/b.yaml        2        -        -",
        "",
        "4 scenarios: 2 passed, 1 failed, 1 skipped",
    ]


def test_a_long_name_is_cut_on_the_left() -> None:
    results = [*verdicts("pass", file=f"x/{'y' * 90}.yaml"), *verdicts("pass", file="z/a.yaml")]
    lines = [line for _, line in text.summary_lines(results, 0.0)]
    assert all(len(line) <= 80 for line in lines)
    assert any(line.startswith("…y") and "yy.yaml" in line for line in lines)


# ------------------------------------------------------------------ exit codes


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["pass"], 0),
        (["pass", "skipped"], 0),
        (["pass", "fail", "unknown", "skipped"], 1),
        (["fail"], 1),
        (["pass", "unknown"], 2),
        (["unknown", "skipped"], 2),
        (["skipped"], 5),
        ([], 5),
    ],
)
def test_exit_codes(words: list[str], status: int) -> None:
    assert text.exit_code(verdicts(*words)) == status
