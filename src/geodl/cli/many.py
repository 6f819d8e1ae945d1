"""What commands of many runs share: where the runs go, one live table or plain lines, stopping, what failed."""

import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, Self

from cyclopts import Group, Parameter
from rich.live import Live
from rich.table import Table

from geodl.cli.display import Stopper, console, plain, say
from geodl.errors import ConfigError, TrainingError
from geodl.sweep import slurm
from geodl.sweep.jobs import Job, bases_first, check
from geodl.sweep.runner import Engine, Local, States, run_all
from geodl.sweep.status import Status, status_of
from geodl.text import count, duration

_where = partial(Parameter, group=Group("Where the runs go", sort_key=6), negative=())
ROWS = 30
"""Lines of a table of runs; a report has them all."""


@dataclass(frozen=True)
class Where:
    """Where the runs of a grid go: processes here, a Ray cluster, or SLURM."""

    jobs: Annotated[
        int | None,
        _where(name=("--jobs", "-j"), help="Runs at a time; unset: as many as cores (or GPUs) and memory allow."),
    ] = None
    ray: Annotated[
        str | None,
        _where(help="Run on a Ray cluster: HOST:PORT, auto (the one that runs here, else a new one), or local."),
    ] = None
    submit: Annotated[Literal["slurm"] | None, _where(help="Write a job array for SLURM and start nothing.")] = None
    sbatch: Annotated[
        str,
        _where(
            allow_leading_hyphen=True,
            show_default=False,
            help="Further options for SLURM, such as '--partition=gpu --time=1-0'.",
        ),
    ] = ""
    allow_environment_change: Annotated[
        bool, _where(help="Go on with runs that were begun with another number of threads or kind of device.")
    ] = False

    def __post_init__(self) -> None:
        if self.jobs is not None and self.jobs < 1:
            raise ConfigError(f"jobs = {self.jobs}: at least 1 is allowed")
        if sum(part is not None for part in (self.jobs, self.ray, self.submit)) > 1:
            raise ConfigError("--jobs, --ray and --submit: one of them is allowed")
        try:
            shlex.split(self.sbatch)
        except ValueError as error:
            raise ConfigError(f"sbatch = {self.sbatch}: {error}") from None

    @property
    def here(self) -> bool:
        """Whether the runs are done by this machine alone."""
        return self.submit is None and self.ray in (None, "local")


def places(where: Where, jobs: Sequence[Job]) -> int:
    """Say how many runs go at a time, as far as this machine knows."""
    return Local(jobs[0].config, where.jobs).places if where.ray is None and where.submit is None and jobs else 1


def confirm(what: str, yes: bool) -> None:
    """Ask before much work; where nobody can be asked, only ``yes`` will do."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"{what}, and there is no terminal to confirm it: add --yes")
    if console.input("Start? [y/N] ", markup=False).strip().lower() not in ("y", "yes"):
        raise ConfigError("not confirmed: nothing was started")


def carry_out(jobs: Sequence[Job], where: Where, *, metric: str | None = None) -> bool:
    """Run those jobs that are not complete, and say what failed; return whether all the runs were carried out here.

    metric: search by it, stopping poor runs early (ASHA); unset: every run is done to its end.
    """
    todo = bases_first([job for job in jobs if not job.complete() and not (metric and job.file("stopped").exists())])
    if not todo:
        return True
    if where.here:
        check(todo)
    if where.submit:
        script = slurm.write(todo, shlex.split(where.sbatch), allow_environment_change=where.allow_environment_change)
        say(f"{count(len(todo), 'run')} in {script}; submit them: sbatch {shlex.quote(str(script))}")
        return False
    failed = _failures(jobs, todo, where, metric)
    if failed:
        first, error = next(iter(failed.items()))
        raise TrainingError(f"{len(failed)} of {count(len(jobs), 'run')} failed; the first: {first.label}: {error}")
    return True


def _failures(jobs: Sequence[Job], todo: list[Job], where: Where, metric: str | None) -> dict[Job, str]:
    stopper, allow = Stopper(), where.allow_environment_change
    with ExitStack() as stack:
        if where.ray is None:
            engine: Engine = Local(todo[0].config, where.jobs, allow_environment_change=allow)
        else:
            from geodl.sweep import asha, cluster

            stack.callback(cluster.leave)
            if metric is not None:
                stack.enter_context(stopper.watching())
                shown = stack.enter_context(Board(jobs))
                return asha.search(todo, where.ray, metric, told=shown, stop=stopper, allow_environment_change=allow)
            engine = cluster.Cluster(where.ray, todo, allow_environment_change=allow)
        stack.enter_context(stopper.watching())
        return run_all(todo, engine, told=stack.enter_context(Board(jobs)), stop=stopper)


class Board:
    """How all the runs stand: one live table on a terminal, a line for each thing that happens elsewhere."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = list(jobs)
        self.numbers = {job: f"run {number} of {len(self.jobs)}" for number, job in enumerate(self.jobs, start=1)}
        self.statuses = {job: status_of(job) for job in self.jobs}
        self._began: dict[Job, float] = {}
        self._took: list[float] = []
        self._over: set[Job] = set()
        self._looked = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> Self:
        """Show the table."""
        complete = sum(status.state == "complete" for status in self.statuses.values())
        say(f"{count(len(self.jobs), 'run')}, {complete} of them complete")
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take the table away: what it showed last is said in lines."""
        if self._live is not None:
            self._live.stop()

    def __call__(self, states: States) -> None:
        """Hear how the runs stand; look at the directories of those that run, once a second."""
        over = [job for job, state in states.items() if state in ("complete", "failed") and job not in self._over]
        if not over and time.monotonic() - self._looked < 1:
            return
        self._looked = time.monotonic()
        for job, state in states.items():
            if state == "running" or job in over:
                self._update(job, status_of(job))
        for job in over:
            self._over.add(job)
            self._took.append(time.monotonic() - self._began.pop(job, time.monotonic()))
        if self._live is not None:
            self._live.update(self.table(), refresh=True)

    def _update(self, job: Job, now: Status) -> None:
        before, self.statuses[job] = self.statuses[job], now
        number = f"{self.numbers[job]}, {job.label}"
        if now.state not in ("waiting", "complete", "failed") and job not in self._began:
            self._began[job] = time.monotonic()
            say(f"{number}: {'goes on' if before.done or before.part else 'started'}")
        if now.state == before.state and now.done == before.done:
            return
        if now.state in ("complete", "failed", "stopped early"):
            say(f"{number}: {now.state}: {now.result}")
        elif now.done > before.done:
            say(f"{number}: phase {now.done - 1} of {(now.phases or 1) - 1} done: {now.result}")

    def table(self) -> Table:
        """Return the table: what runs, what failed, and how many wait or are complete."""
        order = {"running": 0, "waiting for base": 1, "failed": 2, "interrupted": 3, "complete": 4, "waiting": 5}
        rows = sorted(self.statuses.items(), key=lambda item: order.get(item[1].state, 4))
        table = table_of(rows[: max(3, console.height - 6)])
        counts = Counter(each.state for each in self.statuses.values())
        known = [f"{counts[state]} {state}" for state in order if counts[state]]
        left = self._left(counts["waiting"])
        table.caption = ", ".join(known) + (f"; about {duration(left)} left" if left is not None else "")
        return table

    def _left(self, waiting: int) -> float | None:
        """Estimate the seconds until all is over, from the runs that are over and those that run; None: cannot be told yet."""
        running = [each.seconds_left for job, each in self.statuses.items() if job in self._began]
        known = [left for left in running if left is not None]
        if not running or len(known) < len(running):
            return None
        each = sum(self._took) / len(self._took) if self._took else max(known)
        return max(max(known), (sum(known) + waiting * each) / len(known))


def table_of(rows: Sequence[tuple[Job, Status]]) -> Table:
    """Return a table of runs: how far they are, how good so far, how long they will take."""
    table = Table(box=None, pad_edge=False, caption_justify="left")
    for column in ("run", "state", "phase", "accuracy so far, or error", "left"):
        table.add_column(column, no_wrap=column != "accuracy so far, or error")
    for job, status in rows:
        counted = f"{status.done}/{status.phases}" if status.phases else ""
        left = duration(status.seconds_left) if status.seconds_left is not None and status.state == "running" else ""
        table.add_row(plain(job.label), status.state, counted, plain(status.result), left)
    return table
