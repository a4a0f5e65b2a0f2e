"""Counterfactual runs end to end: when they are made, how often, and what is kept of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from faultlab.judge.counterfactual import FILE
from faultlab.report.rejudge import judge_all
from faultlab.runner.answers import Answers
from faultlab.runner.batch import items_of, run_items
from faultlab.scenario.load import load_file
from faultlab.scenario.models import Scenario

pytestmark = pytest.mark.sim

NULL_POINTER = [{"at": "workspace.mc_ptr", "effect": {"value": 0}}]
GIVES_UP = "canary:best_fallback-gives-up-at-once"


def scenario(name: str, subject: str, faults: Any = NULL_POINTER, **fields: Any) -> str:
    given = {
        "faultlab": 1,
        "title": name,
        "topology": "hgx-h100-8",
        "ranks": 2,
        "subject": subject,
        "workspace": {"creation": "mocked"},
        "faults": faults,
    }
    return yaml.safe_dump({**given, **fields})


@pytest.fixture
def runs(faultlab_session: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of all runs made in the session from here on; no answer is known yet."""
    made: list[str] = []
    run = faultlab_session.run

    def recorded(scenario: Scenario, *args: Any, **kwargs: Any) -> Path:
        made.append(scenario.id)
        folder: Path = run(scenario, *args, **kwargs)
        return folder

    monkeypatch.setattr(faultlab_session, "run", recorded)
    monkeypatch.setattr(faultlab_session, "counterfactuals", Answers())
    return made


def run_all(session: Any, paths: list[Path], out: Path, jobs: int = 1) -> dict[str, Any]:
    scenarios = [each for path in paths for each in load_file(path)]
    results = run_items(
        session, items_of(scenarios, ("sim",)), jobs=jobs, out=out, on_result=lambda result: None
    )
    return {result["id"]: result for result in results}


def finding(result: Any) -> Any:
    return result["invariants"]["best_fallback"]


def test_those_who_ask_the_same_pay_once_and_judging_again_says_the_same(
    faultlab_session: Any, runs: list[str], write_scenario: Callable[..., Path], tmp_path: Path
) -> None:
    # Not the same subject, workload or title; the same machine, faults and workspace.
    paths = [
        write_scenario(scenario("one", GIVES_UP), "one.yaml"),
        write_scenario(scenario("two", GIVES_UP, workload=["create", "use", "exit"]), "two.yaml"),
    ]
    results = run_all(faultlab_session, paths, tmp_path / "out", jobs=2)
    assert sorted(runs) == ["counterfactual-mnnvl", "counterfactual-trtllm", "one", "two"]
    for result in results.values():
        assert finding(result)["state"] == "broken"
        assert finding(result)["reason"].startswith("the group settled on none, and trtllm works")

    kept = json.loads((tmp_path / "out" / "one-sim" / FILE).read_text())
    assert {rung: told["outcome"] for rung, told in kept["rungs"].items()} == {
        "mnnvl": "error",
        "trtllm": "used",
    }
    assert {each["id"]: each for each in judge_all(tmp_path / "out")} == results

    # The run's own time, without that of what was tried beside it.
    for name, result in results.items():
        events = [json.loads(line) for line in (tmp_path / "out" / name / "supervisor.jsonl").open()]
        assert result["machine_s"] == events[-1]["machine_s"]


def test_nothing_is_tried_where_nothing_was_passed_by(
    faultlab_session: Any, runs: list[str], write_scenario: Callable[..., Path], tmp_path: Path
) -> None:
    paths = [
        write_scenario(scenario("used", GIVES_UP, []), "used.yaml"),
        write_scenario(
            scenario("order", GIVES_UP, workspace={"creation": "mocked", "backend": "mnnvl"}), "order.yaml"
        ),
        # Its own first attempt answers for mnnvl.
        write_scenario(scenario("reference", "reference"), "reference.yaml"),
    ]
    results = run_all(faultlab_session, paths, tmp_path / "out")
    assert runs == ["used", "order", "reference"]
    states = {name: finding(result)["state"] for name, result in results.items()}
    assert states == {"used-sim": "not-checked", "order-sim": "not-checked", "reference-sim": "held"}
    assert not list((tmp_path / "out").rglob(FILE))


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        # The fault strikes the counterfactual's own first creation: the rung fails there too.
        (1, "held"),
        # It is transient and missed there: nothing can be said.
        ({"from": 2}, "not-checked"),
    ],
)
def test_a_fault_that_counts_calls(
    run_text: Callable[..., Any], runs: list[str], calls: Any, expected: str
) -> None:
    faults = [{"at": "workspace.create", "calls": calls, "effect": {"error": "CUDA_ERROR_NOT_SUPPORTED"}}]
    # Given up at mnnvl; what struck is its one creation, or the second after a destroy.
    workload = ["create", "use", "exit"] if calls == 1 else ["create", "destroy", "create", "use", "exit"]
    result, folder = run_text(scenario("counted", GIVES_UP, faults, workload=workload, topology="hgx-h100-8"))
    told = json.loads((folder / FILE).read_text())["rungs"]
    assert finding(result)["state"] == expected, (finding(result), told)
    assert (told["mnnvl"]["outcome"], told["trtllm"]["outcome"]) == (
        ("error", "error") if calls == 1 else ("used", "used")
    )


def test_a_fault_that_concerns_one_rung_leaves_the_next_to_be_had(
    run_text: Callable[..., Any], runs: list[str]
) -> None:
    faults = [
        {"at": "cuMulticastBindMem", "ranks": [1], "effect": {"error": "CUDA_ERROR_SYSTEM_NOT_READY"}},
    ]
    result, _ = run_text(scenario("concerned", GIVES_UP, faults, workspace={"creation": "real"}))
    assert finding(result)["state"] == "broken"
    assert result["reason"].startswith("best_fallback: the group settled on none, and trtllm works")
