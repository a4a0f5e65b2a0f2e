"""The verdict: when a run shows nothing, what a pass is, and known breaks by subject and version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from faultlab.errors import LabError
from faultlab.judge import registry
from faultlab.judge.breaks import holds_for
from faultlab.scenario.models import Subject
from tests.unit.judging import URL, Run, broken, clean, error, expecting, fault, thing

FLASHINFER = Subject(name="flashinfer")


def verdict(run: Run) -> tuple[str, str]:
    found = run.judge().verdict
    return found.word, found.answer


# -------------------------------------------------------------------- unknown


def test_a_fault_that_fired_nowhere_makes_the_run_unknown(tmp_path: Path) -> None:
    run = clean(Run(tmp_path, faults=[fault("cuMemMap", [0, 1], error="CUDA_ERROR_UNKNOWN")]))
    assert verdict(run) == ("unknown", "fault 0 at cuMemMap never fired on ranks 0 and 1")


def test_an_optional_fault_may_stay_away(tmp_path: Path) -> None:
    run = clean(Run(tmp_path, faults=[fault("cuMemMap", optional=True, error="CUDA_ERROR_UNKNOWN")]))
    assert verdict(run)[0] == "pass"


def test_a_fault_that_fired_on_one_of_its_ranks_fired(tmp_path: Path) -> None:
    run = Run(tmp_path, faults=[fault("cuMemMap", error="CUDA_ERROR_UNKNOWN")])
    run[1].struck(0, "cuMemMap", "error")
    assert verdict(clean(run))[0] == "pass"


def test_a_call_nobody_can_answer_makes_the_run_unknown(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run[1].emit("unknown-call", name="cuMemPoolCreate")
    assert verdict(clean(run)) == (
        "unknown",
        "rank 1 met a call that the machine does not know: cuMemPoolCreate",
    )


def test_a_subject_that_could_not_be_loaded_is_unknown(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        rank.emit("unknown-call", name="subject: x:Y could not be loaded")
        rank.ends(1)
    assert verdict(run) == ("unknown", "the subject could not be loaded: x:Y could not be loaded")


def test_a_failure_of_the_lab_comes_before_everything(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run[1].emit("unknown-call", name="cuMemPoolCreate")
    run.tell("lab-error", text="the forkserver died")
    assert verdict(clean(run)) == ("unknown", "the lab itself failed: the forkserver died")


def test_a_rank_without_events_is_unknown(tmp_path: Path) -> None:
    run = clean(Run(tmp_path))
    run[1].events = []
    assert verdict(run) == ("unknown", "rank 1 recorded no events")


def test_a_rank_whose_end_was_not_recorded_is_unknown(tmp_path: Path) -> None:
    run = clean(Run(tmp_path))
    run[1].exit = None
    assert verdict(run) == ("unknown", "how rank 1 ended was not recorded")


def test_a_rank_that_died_before_the_workload_is_the_labs_matter(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in run:
        rank.ends(1, expected=False)
    assert verdict(run) == ("unknown", "rank 0 ended with status 1 before the workload began")


def test_a_check_that_fails_itself_is_unknown_and_never_a_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(facts: Any) -> Any:
        raise ZeroDivisionError("oops")

    monkeypatch.setitem(registry.CHECKS, "no_leak", fails)
    assert verdict(clean(Run(tmp_path))) == (
        "unknown",
        "no_leak: the check itself failed: ZeroDivisionError: oops",
    )


def test_a_break_that_this_version_cannot_judge_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(registry.CHECKS, "no_leak")
    run = clean(Run(tmp_path, expect=expecting(breaks={"no_leak": {"url": URL}})))
    assert verdict(run) == ("unknown", "no_leak is expected to break, and this version cannot judge it")


# ---------------------------------------------------------------- pass or fail


def leaking(tmp_path: Path, **fields: Any) -> Run:
    run = Run(tmp_path, **fields)
    for rank in run:
        rank.create(made=[thing("handle", "h1", 1)])
        rank.use()
        rank.destroy()
        rank.finish()
    return run


def test_a_clean_run_passes_without_an_expectation(tmp_path: Path) -> None:
    assert verdict(clean(Run(tmp_path))) == ("pass", "used, as expected")


def test_an_unexpected_break_fails_with_its_own_reason(tmp_path: Path) -> None:
    judgement = leaking(tmp_path).judge()
    assert judgement.verdict.word == "fail"
    assert judgement.verdict.unexpected == ("no_leak",)
    assert judgement.verdict.answer.startswith("no_leak: rank 0: 1 handle")


def test_a_known_break_passes_and_is_said(tmp_path: Path) -> None:
    run = leaking(tmp_path, expect=expecting(breaks={"no_leak": {"url": URL}}))
    assert verdict(run) == ("pass", "used, as expected; broken as expected: no_leak")


def test_a_known_break_that_did_not_happen_fails(tmp_path: Path) -> None:
    run = clean(Run(tmp_path, expect=expecting(breaks={"no_leak": {"url": URL}})))
    judgement = run.judge()
    assert judgement.verdict.missing == ("no_leak",)
    assert judgement.verdict.word == "fail"
    assert judgement.verdict.answer == f"no_leak was expected to break ({URL}) and did not: it held"


def test_a_break_known_for_another_subject_is_ignored(tmp_path: Path) -> None:
    known = expecting(breaks={"no_leak": {"url": URL, "subjects": "flashinfer"}})
    assert verdict(leaking(tmp_path / "a", expect=known))[0] == "fail"
    assert verdict(clean(Run(tmp_path / "b", expect=known)))[0] == "pass"
    assert verdict(leaking(tmp_path / "c", expect=known, subject=FLASHINFER))[0] == "pass"


@pytest.mark.parametrize(
    ("expect", "answer"),
    [
        ({"outcome": "fallback"}, "the outcome is used, expected fallback"),
        (
            {"outcome": "used", "path": "trtllm"},
            "mnnvl carried the all-reduce on ranks 0 and 1, expected trtllm",
        ),
        ({"outcome": "used", "path": "mnnvl"}, "used, as expected"),
        ({"path": "mnnvl"}, "used, as expected"),
    ],
)
def test_outcome_and_path_must_match_where_given(tmp_path: Path, expect: dict[str, str], answer: str) -> None:
    word, said = verdict(clean(Run(tmp_path, expect=expecting(**expect))))
    assert said == answer
    assert word == ("pass" if "as expected" in answer else "fail")


def test_a_path_is_expected_of_every_rank_that_speaks(tmp_path: Path) -> None:
    run = Run(tmp_path, expect=expecting(path="mnnvl"), workload=("create", "destroy", "exit"))
    for rank in run:
        rank.create()
        rank.destroy("w0")
        rank.finish()
    answer = "nothing carried the all-reduce on ranks 0 and 1, expected mnnvl"
    assert verdict(run) == ("fail", answer)


def test_a_rank_that_the_scenario_killed_need_not_match(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        faults=[fault("cuMemCreate", [1], kill=True)],
        expect=expecting(outcome="fallback", path="none"),
    )
    run[1].begin("create")
    run[1].strike(0, run[1].enter("cuMemCreate"), "cuMemCreate", "kill")
    run[1].ends(None, "SIGKILL", expected=False)
    run[0].create_none()
    run[0].use("none")
    run[0].destroy()
    run[0].finish(probe=lambda group: None)
    assert verdict(run)[0] == "pass"


def test_an_expected_error_passes(tmp_path: Path) -> None:
    run = Run(tmp_path, expect=expecting(outcome="error"))
    for rank in run:
        rank.create_raises(error())
        rank.destroy()
        rank.finish()
    assert verdict(run) == ("pass", "error, as expected")


def test_a_mismatch_names_the_ranks_that_made_it(tmp_path: Path) -> None:
    run = Run(tmp_path, expect=expecting(outcome="used", breaks={"correct_result": {"url": URL}}))
    for rank in run:
        rank.create()
        rank.use(off=float(rank.rank))
        rank.destroy("w0")
        rank.finish()
    assert verdict(run) == ("fail", "the outcome is wrong-result, expected used (rank 1)")


@pytest.mark.parametrize(
    ("subject", "word"), [("reference", "fail"), ("hardened", "fail"), ("flashinfer", "pass")]
)
def test_the_files_outcome_binds_only_two_subjects_of_the_command_line(
    tmp_path: Path, subject: str, word: str
) -> None:
    run = Run(
        tmp_path,
        overrides={"subject": subject},
        subject=Subject(name=subject),
        expect=expecting(outcome="fallback", path="trtllm"),
    )
    assert verdict(clean(run))[0] == word


def test_invariants_are_judged_for_a_subject_of_the_command_line(tmp_path: Path) -> None:
    run = leaking(tmp_path, overrides={"subject": "flashinfer"}, subject=FLASHINFER)
    judgement = run.judge()
    assert judgement.verdict.word == "fail"
    assert broken(judgement) == {"no_leak"}


# --------------------------------------------------------------- the specifiers

VERSIONS = {"flashinfer-python": "0.7.2", "torch": "2.11.0", "vllm": "0.26.1"}


@pytest.mark.parametrize(
    ("specifier", "subject", "holds"),
    [
        (None, Subject(name="anything"), True),
        ("flashinfer", FLASHINFER, True),
        ("flashinfer", Subject(name="reference"), False),
        ("flashinfer,reference", Subject(name="reference"), True),
        ("flashinfer, reference", FLASHINFER, True),
        ("vllm<0.27", Subject(name="vllm", version="0.26.0"), True),
        ("vllm<0.27", Subject(name="vllm", version="0.27.0"), False),
        ("vllm<0.27", Subject(name="vllm", version="0.27.0rc1"), False),
        ("vllm<0.27", Subject(name="vllm"), True),  # From what the run recorded.
        ("vllm<0.26", Subject(name="vllm"), False),
        ("vllm>=0.25,<0.27", Subject(name="vllm", version="0.26"), True),
        ("vllm>=0.25,<0.27", Subject(name="vllm", version="0.24"), False),
        ("vllm>=0.25,<0.27, reference", Subject(name="reference"), True),
        ("vllm>=0.25,<0.27, reference", Subject(name="vllm", version="0.27"), False),
        ("reference, vllm >= 0.25, < 0.27", Subject(name="vllm", version="0.26"), True),
        ("vllm!=0.26.1", Subject(name="vllm"), False),
        ("flashinfer<0.7.3", FLASHINFER, True),
        ("flashinfer<0.7.3", Subject(name="flashinfer", flashinfer="0.7.4"), False),
        ("torch-symm-mem>=2.11", Subject(name="torch-symm-mem"), True),
        ("sglang<1", Subject(name="sglang"), False),  # Nobody knows its version.
        ("sglang<1", Subject(name="sglang", version="main"), False),
        ("canary:no_leak-once", Subject(name="canary:no_leak-once"), True),
        ("canary:no_leak", Subject(name="canary:no_leak-once"), False),
        ("my.module:Subject", Subject(name="my.module:Subject"), True),
        ("vllm<nonsense", Subject(name="vllm"), False),
    ],
)
def test_subjects_of_a_break(specifier: str | None, subject: Subject, holds: bool) -> None:
    assert holds_for(specifier, subject, VERSIONS) is holds


@pytest.mark.parametrize("specifier", ["", "<0.27", "vllm,,reference", "???"])
def test_a_text_that_names_no_subject_is_an_error(specifier: str) -> None:
    with pytest.raises(LabError, match="names no subject"):
        holds_for(specifier, FLASHINFER, {})
