"""The command line: ``faultlab run``, ``check``, ``list``, ``sites``, ``schema``, ``judge``.

Exit codes of ``run``: 0 all as expected and at least one pass, 1 some failed,
2 some unknown and none failed, 3 a scenario file is wrong and nothing ran,
4 the command line or the lab itself is at fault, 5 nothing was selected or
everything was skipped, 130 interrupted.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from faultlab import limits
from faultlab.errors import FaultlabError, ScenarioError
from faultlab.scenario.load import check_paths, load_paths

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="A fault-injection lab for multi-GPU communication workspaces.",
)

EXIT_WRONG_FILE = 3
EXIT_ERROR = 4
EXIT_INTERRUPTED = 130


class Lane(str, Enum):
    """Where scenarios run."""

    sim = "sim"
    gpu = "gpu"
    both = "both"


Paths = Annotated[list[Path], typer.Argument(help="Scenario files, or folders of them.", show_default=False)]


@contextmanager
def _told() -> Iterator[None]:
    """Errors of the lab become one clear text and an exit code, never a traceback."""
    try:
        yield
    except ScenarioError as error:
        _fail(str(error), EXIT_WRONG_FILE)
    except FaultlabError as error:
        _fail(str(error), EXIT_ERROR)
    except KeyboardInterrupt:
        _fail("interrupted", EXIT_INTERRUPTED)


def _fail(text: str, status: int) -> NoReturn:
    print(text, file=sys.stderr)
    raise typer.Exit(status)


@app.command()
def run(
    paths: Paths,
    select: Annotated[
        str | None, typer.Option("-k", help="Only ids that match: an id, or words with and, or, not.")
    ] = None,
    lane: Annotated[Lane, typer.Option(help="The simulated machine, the real one, or both.")] = Lane.sim,
    subject: Annotated[str | None, typer.Option(help="Run this subject instead of the files'.")] = None,
    out: Annotated[Path | None, typer.Option(help="Keep results and events in this folder.")] = None,
    jobs: Annotated[
        int,
        typer.Option(min=1, max=64, help="How many scenarios run at a time.", show_default="two a processor"),
    ] = limits.JOBS,
) -> None:
    """Run scenarios and say, for each, whether its faults ended in a clean fallback."""
    with _told():
        raise typer.Exit(_run(paths, select, lane, subject, out, jobs))


def _run(
    paths: list[Path], expression: str | None, lane: Lane, subject: str | None, out: Path | None, jobs: int
) -> int:
    from faultlab.report import text
    from faultlab.runner import batch
    from faultlab.runner.session import Session

    lanes = ("sim", "gpu") if lane is Lane.both else (lane.value,)
    items = batch.select(batch.items_of(load_paths(paths), lanes, subject), expression)
    console = Console(highlight=False, soft_wrap=True)
    with Session() as session:
        if any(not batch.skip_reason(item) for item in items):
            session.warm_up()
        began = time.monotonic()
        results = batch.run_items(
            session, items, jobs=jobs, out=out, on_result=lambda result: text.print_result(console, result)
        )
    text.print_summary(console, results, time.monotonic() - began)
    return text.exit_code(results)


@app.command()
def check(paths: Paths) -> None:
    """Check scenario and topology files without running anything."""
    with _told():
        scenarios, topologies = check_paths(paths)
        print(f"{scenarios} scenarios and {topologies} topology files are right")


@app.command(name="list")
def list_scenarios(
    paths: Paths,
    select: Annotated[str | None, typer.Option("-k", help="Only ids that match.")] = None,
    lane: Annotated[Lane, typer.Option(help="The lane.")] = Lane.both,
) -> None:
    """List the scenarios that ``run`` would run, one id a line, with their titles."""
    from faultlab.runner import batch

    with _told():
        lanes = ("sim", "gpu") if lane is Lane.both else (lane.value,)
        for item in batch.select(batch.items_of(load_paths(paths), lanes), select):
            print(f"{item.id}  {item.scenario.title}")


@app.command()
def sites(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="A scenario whose sites are traced live.")
    ] = None,
    select: Annotated[str | None, typer.Option("-k", help="Which scenario of the file.")] = None,
) -> None:
    """List every site; with a scenario, those its ranks reach, counted in a live run without its faults."""
    from faultlab.report import sites as report

    with _told():
        console = Console(highlight=False, soft_wrap=True)
        if not paths:
            report.print_table(console)
        else:
            report.print_trace(console, load_paths(paths), select)


@app.command()
def schema() -> None:
    """Print the JSON Schema of scenario files."""
    from faultlab.scenario.schema import json_schema

    print(json.dumps(json_schema(), indent=1))


@app.command(name="judge")
def judge_folder(folder: Annotated[Path, typer.Argument(help="A folder that 'run --out' wrote.")]) -> None:
    """Judge recorded runs again with today's invariants."""
    from faultlab.report import text
    from faultlab.report.rejudge import judge_all

    with _told():
        results = judge_all(folder)
        console = Console(highlight=False, soft_wrap=True)
        for result in results:
            text.print_result(console, result)
        text.print_summary(console, results, 0.0)
        raise typer.Exit(text.exit_code(results))


def main() -> None:
    """The entry point: Typer's own usage errors exit 4, as the design says."""
    try:
        status = app(standalone_mode=False)
    except typer.Exit as stop:
        status = stop.exit_code
    except (KeyboardInterrupt, typer.Abort):
        status = EXIT_INTERRUPTED
    except Exception as error:
        show = getattr(error, "show", None)
        if show is None:
            raise
        show()
        status = EXIT_ERROR
    sys.exit(status or 0)


if __name__ == "__main__":
    main()
