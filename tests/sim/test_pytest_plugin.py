"""The plugin as people use it: collection, marks, selection, failures, xdist."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.sim, pytest.mark.slow]

TWO = """\
faultlab: 1
title: no fault
topology: pcie-4
ranks: 2
subject: reference
expect: {outcome: used, path: trtllm}
matrix: {workspace.creation: [real, mocked]}
"""


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments)


def test_one_item_per_scenario_and_lane(pytester: pytest.Pytester) -> None:
    pytester.path.joinpath("two.yaml").write_text(TWO)
    pytester.path.joinpath("other.yaml").write_text("just: data\n")
    result = run(pytester, "--collect-only", "-q")
    for name in (
        "two[creation=real]-sim",
        "two[creation=real]-gpu",
        "two[creation=mocked]-sim",
        "two[creation=mocked]-gpu",
    ):
        assert f"two.yaml::{name}" in result.stdout.str()


def test_marks_select_the_lane_and_gpu_skips_with_a_reason(pytester: pytest.Pytester) -> None:
    pytester.path.joinpath("two.yaml").write_text(TWO)
    run(pytester, "-m", "sim", "-q").assert_outcomes(passed=2, deselected=2)
    skipped = run(pytester, "-m", "gpu", "-rs")
    skipped.assert_outcomes(skipped=2, deselected=2)
    assert "GPU" in skipped.stdout.str() or "gpu lane" in skipped.stdout.str()


def test_two_workers_run_it_too(pytester: pytest.Pytester) -> None:
    pytester.path.joinpath("two.yaml").write_text(TWO)
    run(pytester, "-m", "sim", "-n", "2").assert_outcomes(passed=2)


def test_a_failure_shows_its_cause_and_the_replay_command(pytester: pytest.Pytester) -> None:
    pytester.path.joinpath("two.yaml").write_text(TWO.replace("outcome: used", "outcome: hang"))
    result = run(pytester, "-m", "sim", "-k", "mocked")
    result.assert_outcomes(failed=1, deselected=3)
    text = result.stdout.str()
    assert "expected hang" in text
    assert "faultlab run" in text
    assert "Traceback" not in text


def test_unknown_fails_with_that_word(pytester: pytest.Pytester) -> None:
    fault = "faults: [{at: cuMulticastBindMem, effect: {error: CUDA_ERROR_ILLEGAL_STATE}}]\n"
    pytester.path.joinpath("two.yaml").write_text(TWO + fault)
    result = run(pytester, "-m", "sim", "-k", "real")
    result.assert_outcomes(failed=1, deselected=3)
    assert "unknown" in result.stdout.str().lower()


def test_a_wrong_file_is_an_error_with_its_place(pytester: pytest.Pytester) -> None:
    pytester.path.joinpath("two.yaml").write_text(TWO + "rank: 2\n")
    result = run(pytester, "-m", "sim")
    assert result.ret != 0
    assert "two.yaml:8:1" in result.stdout.str()
    assert "Traceback" not in result.stdout.str()
