"""The command line as people script against it: exit codes, files, clear errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.sim

GOOD = """\
faultlab: 1
title: no fault
topology: pcie-4
ranks: 2
subject: reference
expect: {outcome: used, path: trtllm}
"""

RESULT_KEYS = {
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


def faultlab(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "faultlab.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_run_writes_results_and_events(write_scenario: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = faultlab("run", write_scenario(GOOD), "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert set(result) >= RESULT_KEYS
    assert result["id"] == "case-sim"
    assert len(result["invariants"]) == 15
    for rank in range(2):
        lines = (out / "case-sim" / f"rank{rank}.jsonl").read_text().splitlines()
        assert all(json.loads(line)["v"] == 1 for line in lines)
    again = faultlab("judge", out)
    assert again.returncode == 0, again.stdout + again.stderr


def test_a_fault_that_never_fires_is_unknown_and_exits_2(write_scenario: Callable[..., Path]) -> None:
    text = GOOD + "faults: [{at: cuMulticastBindMem, effect: {error: CUDA_ERROR_ILLEGAL_STATE}}]\n"
    done = faultlab("run", write_scenario(text))
    assert done.returncode == 2, done.stdout
    assert "unknown" in done.stdout.lower()
    assert "cuMulticastBindMem" in done.stdout


def test_an_unexpected_outcome_fails_and_exits_1(write_scenario: Callable[..., Path]) -> None:
    done = faultlab("run", write_scenario(GOOD.replace("outcome: used", "outcome: crash")))
    assert done.returncode == 1
    assert "crash" in done.stdout


def test_nothing_selected_exits_5(write_scenario: Callable[..., Path]) -> None:
    assert faultlab("run", write_scenario(GOOD), "-k", "nothing_like_it").returncode == 5


def test_the_gpu_lane_is_skipped_with_its_reason(write_scenario: Callable[..., Path]) -> None:
    done = faultlab("run", write_scenario(GOOD), "--lane", "gpu")
    assert done.returncode == 5
    assert "GPU" in done.stdout or "gpu" in done.stdout


def test_a_wrong_command_exits_4() -> None:
    done = faultlab("run", "--no-such-option")
    assert done.returncode == 4
    assert "Traceback" not in done.stderr


def test_the_replay_command_runs_it_again(write_scenario: Callable[..., Path], tmp_path: Path) -> None:
    path = write_scenario(GOOD + "matrix: {ranks: [2, 4]}\n")
    out = tmp_path / "out"
    faultlab("run", path, "-k", "case[ranks=2]-sim", "--out", out)
    (result,) = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert result["id"] == "case[ranks=2]-sim"
    import shlex

    words = shlex.split(result["replay"])
    assert words[:2] == ["faultlab", "run"]
    done = faultlab(*words[1:])
    assert done.returncode == 0
    assert "case[ranks=2]-sim" in done.stdout
    assert "case[ranks=4]-sim" not in done.stdout


WRONG = {
    "unknown-key": GOOD + "rank: 2\n",
    "unknown-site": GOOD + "faults: [{at: cuMulticastAdDevice, effect: {hang: true}}]\n",
    "impossible-code": GOOD
    + "faults: [{at: cuMemAddressReserve, effect: {error: CUDA_ERROR_ILLEGAL_STATE}}]\n",
    "rank-out-of-range": GOOD + "faults: [{at: cuMemCreate, ranks: [7], effect: {hang: true}}]\n",
    "alias-bomb": "faultlab: 1\na: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b]\n"
    "d: &d [*c,*c,*c,*c,*c,*c,*c,*c]\ne: [*d,*d,*d,*d,*d,*d,*d,*d]\n",
    "huge-matrix": GOOD
    + f"matrix: {{workspace.hidden_dim: {list(range(8, 108))}, workspace.max_token_num: {list(range(1, 101))}}}\n",
    "python-tag": "faultlab: 1\ntitle: !!python/object/apply:os.system [echo]\n",
    "tabs": "faultlab: 1\ntitle: x\nfaults:\n\t- at: cuMemCreate\n",
    "empty": "",
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_a_wrong_file_gives_one_clear_error_and_runs_nothing(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.yaml"
    path.write_text(WRONG[name])
    _is_one_clear_error(path)


def test_binary_junk_and_a_missing_file_give_one_clear_error(tmp_path: Path) -> None:
    junk = tmp_path / "junk.yaml"
    junk.write_bytes(bytes(range(256)) * 20)
    _is_one_clear_error(junk)
    _is_one_clear_error(tmp_path / "missing.yaml")


def _is_one_clear_error(path: Path) -> None:
    done = faultlab("run", path)
    assert done.returncode == 3, (done.returncode, done.stdout, done.stderr)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    named = [line for line in done.stderr.splitlines() if path.name in line]
    assert len(named) == 1, done.stderr


def test_sites_come_from_a_live_trace(write_scenario: Callable[..., Path]) -> None:
    done = faultlab("sites", write_scenario(GOOD))
    assert done.returncode == 0, done.stderr
    assert "cuMemCreate" in done.stdout
    assert "cuMulticastBindMem" not in done.stdout
    assert faultlab("sites").stdout.count("\n") > 60
