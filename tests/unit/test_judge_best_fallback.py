"""best_fallback both ways: which rungs are asked about, and what their counterfactuals mean."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from faultlab.judge import counterfactual, judge
from faultlab.judge.reading import read_facts
from faultlab.report.results import result_object
from faultlab.scenario.models import CallsFrom, Fault, Subject, WorkspaceSpec
from tests.unit.judging import Run, broken, clean, error, fault, ordered, reason, state, topology

CONSUMER = Subject(name="my.consumer:Consumer")
NULL = fault("workspace.mc_ptr", value=0)
USED = {"outcome": "used", "path": "", "broken": [], "unknown": ""}


def consumer(folder: Path, **fields: Any) -> Run:
    """A subject with a ladder of its own, struck by a null pointer unless told otherwise."""
    run = Run(folder, **{"subject": CONSUMER, "faults": (NULL,), **fields})
    for rank in run:
        rank.events[0]["ladder"] = ["mnnvl", "trtllm"]
    return run


def settles(run: Run, rung: str, *, strike: bool = True, path: str | None = None) -> Run:
    """The whole group is struck by fault 0, settles on ``rung``, and reduces by it or ``path``."""
    for rank in run:
        with rank.step("create") as result:
            if strike:
                site = run.scenario.faults[0].at
                rank.strike(0, rank.call(site), site, run.scenario.faults[0].effect.kind, "after")
            if rung == "none":
                result["returned"] = "none"
            else:
                result.update(returned="object", backend=rung, workspace=rank.returned(rung))
        rank.use(path or rung)
        rank.destroy("w0")
        rank.finish()
    return run


def answered(run: Run, **rungs: Any) -> Any:
    """The judgement with these answers beside the run."""
    folder = run.write()
    counterfactual.write(folder, {rung: {**USED, **told} for rung, told in rungs.items()})
    return judge(folder)


# ---------------------------------------------------------- what an answer means


def test_a_rung_that_works_under_the_same_faults_was_passed_by(tmp_path: Path) -> None:
    judgement = answered(settles(consumer(tmp_path), "none"), mnnvl={"outcome": "error"}, trtllm={})
    assert broken(judgement) == {"best_fallback"}
    assert reason(judgement, "best_fallback") == (
        "the group settled on none, and trtllm works under the same faults "
        "(reference, with trtllm ordered, used it with a correct result)"
    )


@pytest.mark.parametrize(
    "told", [{"outcome": "error"}, {"outcome": "hang"}, {"outcome": "crash"}, {"outcome": "fallback"}]
)
def test_a_rung_that_does_not_work_is_rightly_passed_by(tmp_path: Path, told: Any) -> None:
    assert state(answered(settles(consumer(tmp_path), "trtllm"), mnnvl=told), "best_fallback") == "held"


def test_a_rung_that_breaks_something_else_is_no_better(tmp_path: Path) -> None:
    judgement = answered(settles(consumer(tmp_path), "trtllm"), mnnvl={"broken": ["bounded_init"]})
    assert state(judgement, "best_fallback") == "held"


def test_what_was_not_tried_or_is_unknown_is_not_checked(tmp_path: Path) -> None:
    untried = settles(consumer(tmp_path / "untried"), "trtllm").judge()
    assert reason(untried, "best_fallback") == "whether mnnvl alone would have worked was not tried"
    unknown = answered(settles(consumer(tmp_path / "unknown"), "trtllm"), mnnvl={"unknown": "the lab failed"})
    assert reason(unknown, "best_fallback") == (
        "whether mnnvl alone would have worked is unknown: the lab failed"
    )
    assert untried.verdict.word == unknown.verdict.word == "pass"


def test_judging_the_kept_folder_again_says_the_same(tmp_path: Path) -> None:
    first = answered(settles(consumer(tmp_path / "run"), "trtllm"), mnnvl={})
    shutil.copytree(tmp_path / "run", tmp_path / "kept")
    again = judge(tmp_path / "kept")
    assert again.invariants == first.invariants
    assert broken(again) == {"best_fallback"}


def test_its_time_is_not_the_run_s(tmp_path: Path) -> None:
    alone = result_object(settles(consumer(tmp_path / "a"), "trtllm").judge(), tmp_path / "a")
    answered_too = result_object(
        answered(settles(consumer(tmp_path / "b"), "trtllm"), mnnvl={}), tmp_path / "b"
    )
    assert alone["machine_s"] == answered_too["machine_s"]


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"v": 1}', '{"v": 99, "rungs": {}}', '{"v": 1, "rungs": {"x": 1}}']
)
def test_a_damaged_file_is_an_error_of_its_own(tmp_path: Path, text: str) -> None:
    folder = settles(consumer(tmp_path), "trtllm").write()
    (folder / counterfactual.FILE).write_text(text)
    from faultlab.errors import LabError

    with pytest.raises(LabError, match="not a run that can be judged"):
        judge(folder)


# ------------------------------------------------------------- the same faults


def counted(at: str = "cuMemCreate", **fields: Any) -> Fault:
    return Fault.model_validate(
        {"at": at, "calls": CallsFrom(from_=2), "effect": {"error": "CUDA_ERROR_OUT_OF_MEMORY"}, **fields}
    )


@pytest.mark.parametrize("calls", [1, [1, 3], {"from": 2}, {"chance": 0.5}])
def test_a_fault_that_counts_calls_is_met_otherwise_there(tmp_path: Path, calls: Any) -> None:
    run = settles(consumer(tmp_path, faults=(counted(calls=calls),)), "trtllm")
    assert reason(answered(run, mnnvl={}), "best_fallback") == (
        "mnnvl alone worked, but fault 0 at cuMemCreate, which struck ranks 0 and 1, counts calls: "
        "another sequence of calls meets it otherwise"
    )
    assert state(answered(run, mnnvl={"outcome": "error"}), "best_fallback") == "held"


def test_a_counting_fault_of_another_rung_or_a_later_time_is_no_excuse(tmp_path: Path) -> None:
    elsewhere = consumer(tmp_path / "elsewhere", faults=(counted(during="mnnvl"),))
    judgement = answered(settles(elsewhere, "none"), mnnvl={"outcome": "error"}, trtllm={})
    assert broken(judgement) == {"best_fallback"}

    later = consumer(tmp_path / "later", faults=(counted("workspace.destroy"),))
    for rank in later:
        rank.create("trtllm")
        rank.use("trtllm")
        with rank.step("destroy"):
            rank.strike(0, rank.call("workspace.destroy", "w0"), "workspace.destroy", "error")
        rank.finish()
    assert "best_fallback" in broken(answered(later, mnnvl={}))


def test_another_rung_that_was_surely_passed_by_outweighs_what_is_unknown(tmp_path: Path) -> None:
    judgement = answered(settles(consumer(tmp_path), "none"), mnnvl={"unknown": "x"}, trtllm={})
    assert broken(judgement) == {"best_fallback"}


# ------------------------------------------------------------ which rungs are asked


def asked(run: Run) -> tuple[str, ...]:
    return counterfactual.needed(read_facts(run.write()))


def test_every_supported_rung_above_the_settled_one(tmp_path: Path) -> None:
    assert asked(settles(consumer(tmp_path / "a"), "none")) == ("mnnvl", "trtllm")
    assert asked(settles(consumer(tmp_path / "b"), "trtllm")) == ("mnnvl",)
    no_multicast = consumer(tmp_path / "c", topology=topology(multicast=False))
    assert asked(settles(no_multicast, "none")) == ("trtllm",)
    preferred = consumer(tmp_path / "d", workspace=WorkspaceSpec(preferred="trtllm"))
    assert asked(settles(preferred, "none")) == ("trtllm",)


def test_the_reference_s_own_first_attempt_answers_for_it(tmp_path: Path) -> None:
    reference = Subject(name="reference")
    assert asked(settles(consumer(tmp_path / "a", subject=reference), "trtllm")) == ()
    assert asked(settles(consumer(tmp_path / "b", subject=reference), "none")) == ("trtllm",)
    judgement = settles(consumer(tmp_path / "c", subject=reference), "trtllm").judge()
    assert state(judgement, "best_fallback") == "held"


def test_nothing_is_asked_where_nothing_was_passed_by(tmp_path: Path) -> None:
    used = clean(consumer(tmp_path / "used", faults=()))
    assert reason(used.judge(), "best_fallback") == "the outcome is used: no fallback"
    no_ladder = settles(Run(tmp_path / "ladder", subject=CONSUMER, faults=(NULL,)), "none")
    assert reason(no_ladder.judge(), "best_fallback") == "the subject declares no ladder of its own"
    large = settles(consumer(tmp_path / "large"), "mnnvl", path="none")
    assert reason(large.judge(), "best_fallback") == (
        "set-up settled on the best rung that is the subject's to choose"
    )
    assert asked(used) == asked(no_ladder) == asked(large) == ()


def test_a_create_while_a_stream_captures_settles_nothing(tmp_path: Path) -> None:
    run = consumer(tmp_path)
    for rank in run:
        rank.emit("capture-begin")
        rank.create_none()
        rank.use("none")
        rank.emit("capture-end", error=None)
        rank.finish()
    assert asked(run) == ()
    assert reason(run.judge(), "best_fallback") == "on which rung the group settled was not seen"


def test_nothing_is_asked_of_an_order_an_error_a_split_or_a_lost_rank(tmp_path: Path) -> None:
    choice = settles(consumer(tmp_path / "order", workspace=ordered("mnnvl")), "trtllm")
    assert reason(choice.judge(), "best_fallback") == "the back end is the user's choice"

    refused = consumer(tmp_path / "error")
    split = consumer(tmp_path / "split")
    lost = consumer(tmp_path / "lost", faults=(fault("cuMemMap", [1], kill=True),))
    for rank in refused:
        rank.create_raises(error())
        rank.finish()
    split[0].create("trtllm")
    split[1].create_none()
    lost[0].create_none()
    lost[1].begin("create")
    lost[1].strike(0, lost[1].enter("cuMemMap"), "cuMemMap", "kill")
    lost[1].ends(None, "SIGKILL", expected=False)
    for rank in (*split, lost[0]):
        rank.finish()
    for run in (choice, refused, split, lost):
        assert asked(run) == ()
        assert state(run.judge(), "best_fallback") == "not-checked"


# ------------------------------------------------------------------ the scenario


def test_the_counterfactual_is_the_same_but_for_the_rung(tmp_path: Path) -> None:
    original = consumer(tmp_path, workspace=WorkspaceSpec(creation="mocked", preferred="mnnvl")).scenario
    alone = counterfactual.scenario_for(original, "trtllm")
    assert alone.subject.name == "reference"
    assert (alone.workspace.backend, alone.workspace.preferred) == ("trtllm", None)
    assert alone.workspace.creation == "mocked"
    assert alone.workload == ("create", "use", "destroy", "exit")
    assert (alone.topology, alone.ranks, alone.budget) == (original.topology, original.ranks, original.budget)
    assert [each.effect for each in alone.faults] == [each.effect for each in original.faults]


def test_who_asks_the_same_asks_with_the_same_words(tmp_path: Path) -> None:
    one = consumer(tmp_path / "a").scenario
    other = one.model_copy(
        update={"id": "other", "path": "elsewhere.yaml", "line": 7, "subject": Subject(name="hardened")}
    )
    told = [counterfactual.scenario_for(each, "mnnvl").model_dump_json() for each in (one, other)]
    assert told[0] == told[1]
    fewer = one.model_copy(update={"faults": ()})
    assert counterfactual.scenario_for(fewer, "mnnvl").model_dump_json() != told[0]
    assert counterfactual.scenario_for(one, "trtllm").model_dump_json() != told[0]


def test_an_answer_is_plain_json_that_reads_back(tmp_path: Path) -> None:
    run = settles(consumer(tmp_path), "mnnvl")
    told = counterfactual.answer(read_facts(run.write()), broken=("no_leak",), unknown="")
    assert json.loads(json.dumps(told)) == told
    counterfactual.write(tmp_path, {"mnnvl": told})
    (record,) = counterfactual.read(tmp_path).values()
    assert (record.outcome, record.broken, record.unknown) == ("used", ("no_leak",), "")
