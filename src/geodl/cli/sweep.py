"""``geodl sweep``: many runs by one command, and ``geodl sweep status``."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from geodl.bench.report import page
from geodl.bench.report.results import read_settings
from geodl.bench.sweep.jobs import Job, Spec, expand, jobs_in, parse_grid, parse_over, read_spec
from geodl.bench.sweep.status import rank, status_of, value_of
from geodl.cli import example_of
from geodl.cli.display import echo
from geodl.cli.grids import ROWS, Where, carry_out, confirm, legend, results_table, table_of
from geodl.cli.options import Flags, layers_of
from geodl.config import Layer
from geodl.core.errors import ConfigError
from geodl.core.text import count
from geodl.methods import configure

MANY = 1000
"""A sweep of more runs than this is confirmed first."""
Root = Annotated[Path, Parameter(help="The directory that holds the runs.")]

app = App(name="sweep", help_epilogue=example_of("sweep"))


@Parameter(name="*")
@dataclass(frozen=True)
class Search:
    """A random search, over ranges that are given beside or instead of a grid.

    Attributes:
        search: Draw points at random; asha (on Ray) also stops poor runs after early phases.
        over: OPTION=LOW:HIGH, log:LOW:HIGH or A,B,...: what to draw from.
        trials: Points to draw.
        metric: What a search compares runs by, in %.
    """

    search: Literal["random", "asha"] | None = None
    over: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None
    trials: int = 20
    metric: Literal["average", "average_incremental", "final", "forgetting"] = "average"


@app.default
def sweep(
    spec: Path | None = None,
    /,
    *,
    grid: list[str] | None = None,
    drawn: Search = Search(),  # noqa: B008  # frozen
    out: Root = Path("runs"),
    dry_run: bool = False,
    yes: bool = False,
    where: Where = Where(),  # noqa: B008  # frozen
    flags: Flags = Flags(),  # type: ignore[valid-type]  # noqa: B008
) -> None:
    """Run a grid or a search.

    Args:
        spec: A TOML file of options with a table [grid], [[grid]] or [over].
        grid: OPTION=A,B,...: values to combine; METHOD+DISTILLATION too.
        dry_run: List the runs and start nothing.
        yes: Start more than 1000 runs without asking.
    """
    if drawn.search == "asha":
        where = _on_ray(where)
    jobs = _jobs(_wanted(spec, grid, drawn, flags), drawn.trials, flags, out, yes or dry_run)
    if dry_run:
        for number, job in enumerate(jobs, start=1):
            echo(f"{number:3d}  {job.label}  ({status_of(job).state}; {job.out})")
        return
    if drawn.search == "random" and where.ray is None:
        echo("random search; on Ray (--ray auto), --search asha stops poor runs after early phases")
    if carry_out(jobs, where, metric=drawn.metric if drawn.search == "asha" else None):
        _conclude(jobs, out, drawn.metric if drawn.search else None)


def _on_ray(where: Where) -> Where:
    """Return where a search with ASHA runs: always on Ray, which implements it."""
    if where.submit is not None or where.jobs is not None:
        raise ConfigError("search = asha: it runs on Ray; allowed is --ray auto, local, HOST:PORT")
    return where if where.ray else replace(where, ray="auto")


def _jobs(wanted: Spec, trials: int, flags: Any, out: Path, yes: bool) -> list[Job]:
    """Return the runs of a sweep, after a confirmation if there are very many."""
    if (points := wanted.count(trials)) > MANY:
        confirm(f"these are {points:,} runs", yes)
    given = {} if flags.seed is None else {"seed": flags.seed}
    seed = configure([Layer("command line", given)]).config.seed
    return expand(wanted.layers, wanted.points(trials, seed), out)


def _wanted(spec: Path | None, grid: list[str] | None, drawn: Search, flags: object) -> Spec:
    """Combine the file and the command line."""
    read = read_spec(spec) if spec else Spec()
    given = parse_grid(grid or [])
    ranges = dict(read.over or {}) | parse_over(drawn.over or [])
    if bool(ranges) != (drawn.search is not None):
        raise ConfigError(
            "--search and --over belong together: --search random --over lr=log:0.01:0.3"
        )
    grids = [{**each, **given} for each in read.grids or [{}]]
    return Spec(layers_of(flags, *read.layers), [each for each in grids if each], ranges)


def _conclude(jobs: list[Job], out: Path, metric: str | None) -> None:
    """Print the results of the runs, the best first in a search, and write their page."""
    complete = [job for job in jobs if job.complete()]
    if not complete:
        return
    if metric:
        complete.sort(key=lambda job: rank(job.out, metric))
        best, stopped = complete[0], len(jobs) - len(complete)
        value = value_of(best.out, metric)
        reached = "unknown" if value is None else f"{value:.2f}"
        more = f"; stopped early: {count(stopped, 'run')}" if stopped else ""
        echo(f"best {metric}: {reached} of {best.label}, {best.out}{more}")
    settings = read_settings([job.out for job in complete])
    first = f", the first {ROWS} settings" if len(settings) > ROWS else ""
    echo(results_table(f"{count(len(complete), 'run')}{first}", settings[:ROWS]))
    echo(legend(settings))
    echo(f"all in one report: {page.write(settings, out / 'report.html')}")


@app.command(help_epilogue="Example: `geodl sweep status runs`")
def status(out: Root = Path("runs"), /) -> None:
    """Show the progress of a sweep, also while it runs: state, phases, accuracy, last error and time left of each run."""
    jobs = jobs_in(out)
    if not jobs:
        echo(f"no sweep in {out}; `geodl sweep` starts one")
        return
    found = [(job.label, status_of(job)) for job in jobs]
    echo(table_of(found))
    counts = Counter(each.state for _, each in found)
    known = [f"{number} {state}" for state, number in sorted(counts.items())]
    echo(f"{count(len(found), 'run')}: {', '.join(known)}")
