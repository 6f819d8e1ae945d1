"""``geodl runs`` and ``geodl cache``."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from geodl.cache import Cache
from geodl.cli.display import result_table, say
from geodl.errors import StoreError
from geodl.files import interpreting, readable
from geodl.store import RunDirectory, list_runs, remove_run, summarize

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
                        "error": run.error,
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
        # The path that an error begins with is the run's own, which the line names already.
        words = run.result if run.error is None else run.error.replace(f"{run.path}/", "").replace(f"{run.path} ", "")
        counted = f"{run.done}/{run.total or '-'}"
        table.add_row(_harmless(run.name), run.state, counted, _harmless(words or ""), readable(run.size))
    say(table)


def _harmless(words: str) -> Text:
    """Return words from a file with control characters spelled out, so that they do nothing to a terminal."""
    signs = (sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in words)
    return Text("".join(signs))


def show(run: Run, /, *, as_json: Json = False) -> None:
    """Show the result of one run so far."""
    store = _run(run)
    done = store.completed()
    metrics = store.load_metrics(done - 1) if done else {}
    if as_json:
        print(json.dumps({key: value for key, value in metrics.items() if key != "confusions"}))
        return
    if done:
        with interpreting(run / "phases" / f"{done - 1:02d}" / "metrics.json"):
            say(result_table(f"{run}, {done} of {store.phases} phases, {len(metrics['classes'])} classes (%)", metrics))
    else:
        say(f"{run}: no phase is complete yet")
    if done < (store.phases or 0):
        say(f"phase {done}, {summarize(run).state}: {_reached(store, done)}")


def _reached(store: RunDirectory, phase: int) -> str:
    reached = "in its first epoch"
    for event in store.read_events():
        if event["kind"] == "epoch" and event.get("phase") == phase:
            with suppress(LookupError, TypeError, ValueError):  # a line that somebody else wrote
                reached = "{stage}, epoch {epoch} of {epochs} done, loss {loss:.3f}, {rate:.0f} images/s".format(
                    **event
                )
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
