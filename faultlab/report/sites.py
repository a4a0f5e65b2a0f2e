"""``faultlab sites``: the table of sites, or those a workload reaches in a live run."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from faultlab import events
from faultlab.errors import UsageError
from faultlab.runner import batch
from faultlab.runner.session import Session
from faultlab.scenario.models import Scenario
from faultlab.sites import SITES, Site


def print_table(console: Console) -> None:
    """Every site, with what it may return and whom it waits for."""
    table = _table("site", "domain", "waits for", "effects", "errors")
    for site in SITES.values():
        table.add_row(
            site.name, site.domain, site.blocks_on or "-", ", ".join(sorted(site.effects)), _errors(site)
        )
    console.print(table)


def print_trace(console: Console, scenarios: list[Scenario], expression: str | None) -> None:
    """The sites the ranks of one scenario reach when nothing is struck."""
    items = batch.select(batch.items_of(scenarios, ("sim",)), expression)
    if not items:
        raise UsageError("no scenario of the sim lane is selected")
    scenario = items[0].scenario.model_copy(update={"faults": ()})
    counts = trace(scenario)
    console.print(f"{items[0].id} without its faults: calls per rank, from the first create on")
    table = _table("site", *[f"rank {rank}" for rank in range(scenario.ranks)], "waits for", "errors")
    for name in sorted(set().union(*counts)):
        site = SITES[name]
        table.add_row(name, *[str(each[name]) for each in counts], site.blocks_on or "-", _errors(site))
    console.print(table)


def trace(scenario: Scenario) -> list[Counter[str]]:
    """How often each rank of a live run reaches each site, the lab's own calls left out."""
    with Session() as session:
        folder = session.run(scenario)
        try:
            return [_count(folder / f"rank{rank}.jsonl") for rank in range(scenario.ranks)]
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _count(path: Path) -> Counter[str]:
    return Counter(
        event["site"]
        for event in events.read(path)
        if event["kind"] == "enter" and event["call"] and not event["lab"]
    )


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _errors(site: Site) -> str:
    return (
        ", ".join(error.removeprefix("CUDA_ERROR_").removeprefix("NVML_ERROR_") for error in site.errors)
        or "-"
    )
