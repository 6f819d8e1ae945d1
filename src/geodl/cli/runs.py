"""``geodl runs`` and ``geodl cache``."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.table import Table

from geodl.cache import Cache
from geodl.cli.display import plain, result_table, say
from geodl.cli.options import Json
from geodl.errors import StoreError
from geodl.experiment import results_of
from geodl.files import readable
from geodl.store import RunDirectory, list_runs, remove_run, summarize
from geodl.text import count

Root = Annotated[Path, Parameter(help="The directory that holds the runs.")]
Run = Annotated[Path, Parameter(help="The run's directory.")]


def without_files(paths: list[Path]) -> list[Path]:
    """Leave files out, such as report.html among `runs/*`; where there is nothing else, they are for the reader to refuse."""
    return [path for path in paths if not path.is_file()] or paths


def list_all(root: Root = Path("runs"), *, as_json: Json = False) -> None:
    """List the runs below a directory with their state and result."""
    found = list_runs(root)
    if as_json:
        names = {"state": "state", "done": "done", "phases": "total", "result": "result", "error": "error"}
        facts = [{"path": str(run.path)} | {key: getattr(run, name) for key, name in names.items()} for run in found]
        print(json.dumps(facts))
        return
    if not found:
        say(f"no runs in {root}; `geodl run --preset digits` makes one")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("run", "state", "phases", "result", "size"):
        table.add_column(column, no_wrap=column != "result")
    for run in found:
        # The path that an error begins with is the run's own, which the line names already.
        words = run.result if run.error is None else run.error.replace(f"{run.path}/", "").replace(f"{run.path} ", "")
        counted = f"{run.done}/{run.total or '-'}"
        table.add_row(plain(run.name), run.state, counted, plain(words or ""), readable(run.size))
    say(table)


def show(run: Run, /, *, as_json: Json = False) -> None:
    """Show the result of one run so far."""
    store = _run(run)
    done = store.completed()
    if as_json:
        print(json.dumps(result_json(store)))
        return
    if done:
        say(result_table(f"{run}, {done} of {count(store.phases or done, 'phase')}", results_of(store)))
    else:
        say(f"{run}: no phase is complete yet")
    if done < (store.phases or 0):
        say(f"phase {done}, {summarize(run).state}: {_reached(store, done)}")


def result_json(store: RunDirectory) -> dict[str, Any]:
    """Return the metrics of a run's last complete phase without the counts, and what follows from those of all."""
    done = store.completed()
    metrics = store.load_metrics(done - 1) if done else {}
    kept = {key: value for key, value in metrics.items() if key != "confusions"}
    return kept | {"results": {name: result.to_dict() for name, result in results_of(store).items()}}


def _reached(store: RunDirectory, phase: int) -> str:
    reached = "in its first epoch"
    for event in store.read_events():
        if event["kind"] == "epoch" and event.get("phase") == phase:
            with suppress(LookupError, TypeError, ValueError):  # a line that somebody else wrote
                words = "{stage}, epoch {epoch} of {epochs} done, loss {loss:.3f}, {rate:.0f} images/s"
                reached = words.format(**event)
    return reached


def _run(path: Path) -> RunDirectory:
    store = RunDirectory(path)
    if store.kind != "run":
        raise StoreError(f"{path} is the directory of a {store.kind}, not of a run; `geodl info {path}` describes it")
    return store


def rm(run: Run, /) -> None:
    """Remove a run's directory."""
    remove_run(_run(run).path)
    say(f"removed {run}")


def show_cache() -> None:
    """Show where the cache is and how large."""
    found = Cache()
    say(f"{found.root}: {readable(found.size())}")


def clear() -> None:
    """Remove all trained base phases from the cache."""
    say(f"{readable(Cache().clear())} freed")
