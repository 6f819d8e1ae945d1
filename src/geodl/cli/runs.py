"""``geodl runs`` and ``geodl cache``."""

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.table import Table

from geodl.cache import Cache
from geodl.cli.display import result_table, say
from geodl.store import RunDirectory, list_runs, remove_run

Json = Annotated[bool, Parameter(name="--json", help="Print JSON.", negative=())]
Root = Annotated[Path, Parameter(help="The directory that holds the runs.")]
Run = Annotated[Path, Parameter(help="The run's directory.")]


def list_all(root: Root = Path("runs"), *, as_json: Json = False) -> None:
    """List the runs below a directory with their state and result."""
    found = list_runs(root)
    if as_json:
        print(
            json.dumps(
                [
                    {
                        "path": str(run.path),
                        "state": run.state,
                        "done": run.done,
                        "phases": run.total,
                        "result": run.result,
                    }
                    for run in found
                ]
            )
        )
        return
    if not found:
        say(f"no runs in {root}; `geodl run --preset digits` makes one")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("run", "state", "phases", "result", "size"):
        table.add_column(column, no_wrap=column != "result")
    for run in found:
        table.add_row(
            run.name, run.state, f"{run.done}/{run.total or '-'}", run.result or "", f"{run.size / 1e6:.1f} MB"
        )
    say(table)


def show(run: Run, /, *, as_json: Json = False) -> None:
    """Show the result of one run so far."""
    store = RunDirectory(run)
    done = store.completed()
    if not done:
        print("{}") if as_json else say(f"{run}: no phase is complete yet")
        return
    metrics = store.load_phase(done - 1).metrics
    if as_json:
        print(json.dumps({key: value for key, value in metrics.items() if key != "confusions"}))
        return
    say(result_table(f"{run}, {done} of {store.phases} phases, {len(metrics['classes'])} classes (%)", metrics))


def rm(run: Run, /) -> None:
    """Remove a run's directory."""
    remove_run(run)
    say(f"removed {run}")


def show_cache() -> None:
    """Show where the cache is and how large."""
    found = Cache()
    say(f"{found.root}: {found.size() / 1e6:.1f} MB")


def clear() -> None:
    """Remove all trained base phases from the cache."""
    say(f"{Cache().clear() / 1e6:.1f} MB freed")
