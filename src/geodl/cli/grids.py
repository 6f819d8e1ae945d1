"""Tables of results, and many runs at once: what the commands for experiments share."""

import shlex
import sys
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, Self

from cyclopts import Group, Parameter
from rich.box import SIMPLE_HEAD
from rich.live import Live
from rich.table import Table

from geodl.bench.report.results import Estimate, Setting
from geodl.bench.runs import RunSummary
from geodl.bench.sweep import slurm
from geodl.bench.sweep.jobs import Job, bases_first, check
from geodl.bench.sweep.runner import Engine, Local, run_all
from geodl.bench.sweep.status import status_of
from geodl.cli.display import Stopper, console, echo, number, plain, table
from geodl.core.errors import ConfigError, TrainingError
from geodl.core.text import count, duration
from geodl.model.classifiers import CLASSIFIERS, is_oracle, notes_on, titles

ROWS = 30
"""Rows of a table of runs; a report has all of them."""
LEGEND = "average: mean accuracy after phases 1 to T; final: after the last; forgetting: accuracy lost on the base classes"


# -------------------------------------------------------------------------------------------------------- results


def results_table(title: str, settings: Sequence[Setting]) -> Table:
    """Return the results of each setting with each classifier; with several seeds, mean and standard deviation."""
    heads = ("method", "classifier", ">average", ">final", ">forgetting")
    made = table(
        *heads[len(settings) == 1 :],
        title=plain(f"{title} (%)"),
        header_style="bold",
        padding=(0, 1),
        box=SIMPLE_HEAD,
        title_justify="left",
        title_style="bold",
    )
    for setting in settings:
        label = [setting.label]
        for name in setting.classifiers:
            values = [setting.value(name, key) for key in ("average", "final", "forgetting")]
            last = name == setting.classifiers[-1]
            row = [*label, titles()[name], *map(_estimate, values)]
            made.add_row(*map(plain, row[-len(made.columns) :]), end_section=last)
            label = [""]
    return made


def legend(settings: Sequence[Setting]) -> str:
    """Return an explanation of the columns and signs of `results_table`."""
    words, seeds = [LEGEND], max(len(setting.runs) for setting in settings)
    if seeds > 1:
        words.append(f"mean ± standard deviation of {seeds} seeds")
    oracles = [name for name in CLASSIFIERS if is_oracle(name)]
    if any(name in setting.classifiers for setting in settings for name in oracles):
        words += [note.rstrip(".") for note in notes_on(oracles)]
    return "; ".join(words)


def _estimate(value: Estimate | None) -> str:
    if value is None or value.spread is None:
        return number(value.mean if value else None)
    return f"{value.mean:.1f} ± {value.spread:.1f}"


# ------------------------------------------------------------------------------------------------------ many runs


@Parameter(name="*", group=Group("Where the runs go", sort_key=6))
@dataclass(frozen=True)
class Where:
    """Where the runs of a grid go: processes on this machine, a Ray cluster, or SLURM.

    Attributes:
        jobs: Runs at a time; unset: as many as cores (or GPUs) and memory allow.
        ray: Run on a Ray cluster: HOST:PORT, auto (a running one, else a new one), or local.
        submit: Write a job array for SLURM and start nothing.
        sbatch: Further options for SLURM, such as '--partition=gpu --time=1-0'.
        allow_environment_change: Resume runs that were started with another number of threads or kind of device.
    """

    jobs: Annotated[int | None, Parameter(alias="-j")] = None
    ray: str | None = None
    submit: Literal["slurm"] | None = None
    sbatch: Annotated[str, Parameter(allow_leading_hyphen=True, show_default=False)] = ""
    allow_environment_change: bool = False

    def __post_init__(self) -> None:
        if self.jobs is not None and self.jobs < 1:
            raise ConfigError(f"jobs = {self.jobs}: at least 1 is allowed")
        if sum(place is not None for place in (self.jobs, self.ray, self.submit)) > 1:
            raise ConfigError("--jobs, --ray and --submit: one of them is allowed")
        try:
            shlex.split(self.sbatch)
        except ValueError as error:
            raise ConfigError(f"sbatch = {self.sbatch}: {error}") from None

    @property
    def here(self) -> bool:
        """Whether all runs are carried out on this machine."""
        return self.submit is None and self.ray in (None, "local")


def places(where: Where, jobs: Sequence[Job]) -> int:
    """Return how many runs go at a time on this machine; 1 for a cluster, whose size is not known."""
    if not jobs or where.ray is not None or where.submit is not None:
        return 1
    return Local(jobs[0].config, where.jobs).places


def confirm(what: str, yes: bool) -> None:
    """Ask for confirmation before much work; without a terminal, ``yes`` is required."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"{what}, and there is no terminal to confirm it: add --yes")
    if console.input("Start? [y/N] ", markup=False).strip().lower() not in ("y", "yes"):
        raise ConfigError("not confirmed: nothing was started")


def carry_out(jobs: Sequence[Job], where: Where, *, metric: str | None = None) -> bool:
    """Run the jobs that are not complete; return whether their results are here (SLURM's come later).

    metric: stop runs early that are poor by this metric (ASHA); unset: complete every run.
    """
    todo = [job for job in jobs if not job.complete()]
    if metric:
        todo = [job for job in todo if not job.file("stopped").exists()]
    if not todo:
        return True
    allow = where.allow_environment_change
    todo = [replace(job, allow_environment_change=allow) for job in bases_first(todo)]
    if where.here:
        check(todo)
    if where.submit:
        script = slurm.write(todo, shlex.split(where.sbatch))
        echo(
            f"{count(len(todo), 'run')} in {script}; submit them: sbatch {shlex.quote(str(script))}"
        )
        return False
    failed = _failures(jobs, todo, where, metric)
    if failed:
        first, error = next(iter(failed.items()))
        raise TrainingError(
            f"{len(failed)} of {count(len(jobs), 'run')} failed; the first: {first.label}: {error}"
        )
    return True


def _failures(
    jobs: Sequence[Job], todo: list[Job], where: Where, metric: str | None
) -> dict[Job, str]:
    stopper = Stopper()
    with ExitStack() as stack:
        if where.ray is None:
            engine: Engine = Local(todo[0].config, where.jobs)
        else:
            from geodl.bench.sweep import asha, cluster

            stack.callback(cluster.leave)
            if metric is None:
                engine = cluster.Cluster(where.ray, todo)
        stack.enter_context(stopper.watching())
        board = stack.enter_context(Board(jobs))
        if where.ray is not None and metric is not None:
            return asha.search(todo, where.ray, metric, notify=board, stop=stopper)
        return run_all(todo, engine, notify=board, stop=stopper)


class Board:
    """Shows the state of all runs: as a live table on a terminal, as a line for each change elsewhere."""

    STATES = (
        "running", "waiting for base", "failed", "interrupted", "stopped early", "complete", "waiting"
    )  # fmt: skip

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.statuses = {job.out: status_of(job) for job in jobs}
        self.labels = {job.out: job.label for job in jobs}
        self._began: dict[Path, float] = {}
        self._took: list[float] = []
        self._running: list[Job] = []
        self._last_read = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        """Show the table."""
        complete = sum(status.state == "complete" for status in self.statuses.values())
        echo(f"{count(len(self.statuses), 'run')}, {complete} of them complete")
        if console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the table; the lines beside it stay."""
        self._live.stop()

    def __call__(self, running: Collection[Job]) -> None:
        """Read the directories of the running runs once a second, and when one ends."""
        ended = [job for job in self._running if job not in running]
        self._running = list(running)
        if not ended and time.monotonic() - self._last_read < 1:
            return
        self._last_read = time.monotonic()
        for job in (*ended, *running):
            self._update(job.out, status_of(job))
        for job in ended:
            self._took.append(time.monotonic() - self._began.pop(job.out, time.monotonic()))
        if self._live.is_started:
            self._live.update(self.table(), refresh=True)

    def _update(self, out: Path, now: RunSummary) -> None:
        before, self.statuses[out] = self.statuses[out], now
        number = list(self.statuses).index(out) + 1
        name = f"run {number} of {len(self.statuses)}, {self.labels[out]}"
        if now.state not in ("waiting", "complete", "failed") and out not in self._began:
            self._began[out] = time.monotonic()
            echo(f"{name}: {'started' if before.total is None else 'resumed'}")
        if now.state == before.state and now.done == before.done:
            return
        if now.state in ("complete", "failed", "stopped early"):
            echo(f"{name}: {now.state}: {now.error or now.result or ''}")
        elif now.done > before.done:
            echo(f"{name}: phase {now.done - 1} of {(now.total or 1) - 1} done: {now.result}")

    def table(self) -> Table:
        """Return the table: running and failed runs first, then as many others as fit, with the number in each state."""
        states = [status.state for status in self.statuses.values()]
        rows = sorted(self.statuses.items(), key=lambda item: self.STATES.index(item[1].state))
        shown = [(self.labels[out], status) for out, status in rows[: max(3, console.height - 6)]]
        made, counts = table_of(shown), Counter(states)
        known = [f"{counts[state]} {state}" for state in self.STATES if counts[state]]
        left = self._left(counts["waiting"])
        made.caption = ", ".join(known) + (f"; about {duration(left)} left" if left else "")
        return made

    def _left(self, waiting: int) -> float | None:
        """Estimate the seconds until all runs end, from those that ended and those that run; None: not known yet."""
        running = [self.statuses[out].seconds_left for out in self._began]
        known = [left for left in running if left is not None]
        if not running or len(known) < len(running):
            return None
        typical = sum(self._took) / len(self._took) if self._took else max(known)
        return max(*known, (sum(known) + waiting * typical) / len(known))


def table_of(rows: Sequence[tuple[str, RunSummary]]) -> Table:
    """Return a table of runs: label, state, progress, accuracy so far or error, and time left."""
    made = table(
        "run", "state", "phase", "accuracy so far, or error", "left", caption_justify="left"
    )
    for label, status in rows:
        counted = f"{status.done}/{status.total}" if status.total else ""
        left = "" if status.seconds_left is None else duration(status.seconds_left)
        result = status.error or status.result or ""
        made.add_row(*map(plain, (label, status.state, counted, result, left)))
    return made
