"""``geodl runs`` and ``geodl cache``."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from geodl.bench.experiment import results_of
from geodl.bench.report.results import read_settings
from geodl.bench.runs import RunSummary, list_runs, summarize
from geodl.cli.display import Json, echo, print_json, table
from geodl.cli.grids import results_table
from geodl.core.cache import Cache
from geodl.core.errors import StoreError
from geodl.core.text import count, readable
from geodl.model.metrics import Trajectory
from geodl.store import Directory, remove_directory

Run = Annotated[Path, Parameter(help="The run's directory.")]


def list_all(root: Path = Path("runs"), *, as_json: Json = False) -> None:
    """List the runs below a directory with their state and result.

    Args:
        root: The directory that holds the runs, or a run's own.
    """
    runs = list_runs(root)
    if as_json:
        print_json([_facts(run) for run in runs])
    elif runs:
        rows = [_row(run) for run in runs]
        echo(table("run", "state", "phases", "result", "size", rows=rows))
    else:
        echo(f"no runs in {root}; `geodl run --preset digits` starts one")


def _facts(run: RunSummary) -> dict[str, Any]:
    return {
        "path": str(run.path),
        "state": run.state,
        "done": run.done,
        "phases": run.total,
        "result": run.result,
        "error": run.error,
    }


def _row(run: RunSummary) -> list[str]:
    # Errors name the run's path, which the line has already.
    result = run.error or run.result or ""
    result = result.replace(f"{run.path}/", "").replace(f"{run.path} ", "")
    return [run.name, run.state, f"{run.done}/{run.total or '-'}", result, readable(run.size)]


def show(run: Run, /, *, as_json: Json = False) -> None:
    """Show the result of one run so far."""
    store = _run(run)
    done = store.completed()
    if as_json:
        print_json(result_json(store))
        return
    if done:
        settings = read_settings([run])
        known = count(len(settings[0].first.classes), "class")
        phases = count(store.phases or done, "phase")
        echo(results_table(f"{run}, {done} of {phases}, {known}", settings))
    else:
        echo(f"{run}: no phase is complete yet")
    if done < (store.phases or 0):
        echo(f"phase {done}, {summarize(run).state}: {_reached(store, done)}")


def result_json(store: Directory) -> dict[str, Any]:
    """Return the metrics of the last complete phase, without confusion counts, and the results over all phases."""
    done = store.completed()
    metrics = store.phase(-1).json("metrics.json") if done else {}
    found = {key: value for key, value in metrics.items() if key not in ("confusions", "held_out")}
    found["results"] = _dicts(results_of(store))
    if "held_out" in metrics:
        found["held_out"] = _dicts(results_of(store, held_out=True))
    return found


def _dicts(results: Mapping[str, Trajectory]) -> dict[str, Any]:
    return {name: result.to_dict() for name, result in results.items()}


def _reached(store: Directory, phase: int) -> str:
    reached = "in its first epoch"
    for event in store.read_events():
        if event["kind"] == "epoch" and event.get("phase") == phase:
            with suppress(LookupError, TypeError, ValueError):  # a line that geodl did not write
                progress = (
                    "{stage}, epoch {epoch} of {epochs}, loss {loss:.3f}, {rate:.0f} images/s"
                )
                reached = progress.format(**event)
    return reached


def _run(path: Path) -> Directory:
    store = Directory(path)
    if store.kind != "run":
        raise StoreError(
            f"{path} is the directory of a {store.kind}, not of a run; `geodl info {path}` describes it"
        )
    return store


def rm(run: Run, /) -> None:
    """Remove a run's directory."""
    remove_directory(_run(run).path)
    echo(f"removed {run}")


def show_cache() -> None:
    """Show the location and size of the cache."""
    cache = Cache()
    echo(f"{cache.root}: {readable(cache.size())}")


def clear() -> None:
    """Remove all trained base phases and converted models from the cache."""
    echo(f"{readable(Cache().clear())} freed")
