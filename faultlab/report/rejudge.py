"""Judges the runs that ``run --out`` kept, with today's invariants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from faultlab import limits
from faultlab.errors import UsageError
from faultlab.judge import judge
from faultlab.report.results import result_object


def judge_all(folder: Path) -> list[dict[str, Any]]:
    """The results of every recorded run below ``folder``, in the order of their names."""
    plans = sorted(folder.rglob("run.json")) if folder.is_dir() else []
    if not plans:
        raise UsageError(f"{folder}: no recorded run in it (a folder that 'faultlab run --out' wrote)")
    assert len(plans) <= limits.SCENARIOS_PER_RUN, len(plans)
    return [result_object(judge(plan.parent), plan.parent) for plan in plans]
