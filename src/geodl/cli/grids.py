"""What commands of runs share: the display of a run, tables of results, and many runs at once."""

import shlex
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
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
from geodl.bench.work import Progress
from geodl.cli.display import Display, Stopper, console, plain, say, table
from geodl.core import events
from geodl.core.errors import ConfigError, TrainingError
from geodl.core.text import count, duration, listed
from geodl.model.classifiers import CLASSIFIERS, is_oracle, notes_on, titles
from geodl.model.metrics import Confusion, confusions_of, finite

_where = partial(Parameter, group=Group("Where the runs go", sort_key=6), negative=())
ROWS = 30
"""Lines of a table of runs; a report has them all."""
LEGEND = "average: mean accuracy after phases 1 to T; final: after the last; forgetting: accuracy lost on the base classes"


# ------------------------------------------------------------------------------------------------------- one run


class Watch(Display):
    """Shows what a run learns, how far it is, and how good the network is after each phase."""

    def __init__(self, title: str, *, quiet: bool = False) -> None:
        super().__init__(quiet=quiet)
        self.title, self.progress, self._base = title, Progress(), 0
        self._epochs = 1
        self.shows = {
            events.RunStarted: self._started,
            events.Advised: lambda event: say(f"  {event.sentence}", "yellow"),
            events.PhaseStarted: self._phase,
            events.BaseAwaited: lambda _: say("    waiting for a run that trains this base phase"),
            events.BaseCached: lambda _: say("    base phase from the cache"),
            events.StageStarted: self._stage,
            events.StepTaken: self._step,
            events.EpochEnded: self.epoch,
            events.PhaseEvaluated: self._evaluated,
        }

    def __call__(self, event: events.Event) -> None:
        """Show an event."""
        self.progress.hear(event.kind, vars(event), time.time())
        super().__call__(event)

    def _started(self, event: events.RunStarted) -> None:
        sizes, self._base = event.sizes, event.sizes[0]
        words = f": {count(sum(sizes), 'class')}, learned as {' + '.join(map(str, sizes))}"
        say(plain(self.title, "bold") + plain(words))
        if event.done == len(sizes):
            say(f"  already complete: {event.directory}")
        elif event.done:
            say(f"  resuming with phase {event.done} of {len(sizes) - 1}: {event.directory}")

    def _phase(self, event: events.PhaseStarted) -> None:
        say(f"  phase {event.phase}: {listed(event.classes)} ({count(event.images, 'image')})")

    def _stage(self, event: events.StageStarted) -> None:
        self._epochs = event.epochs
        if 0 < event.epoch < event.epochs:
            say(f"    resuming with epoch {event.epoch + 1} of {event.epochs}")

    def _step(self, event: events.StepTaken) -> None:
        state = f"phase {event.phase} {event.stage}, epoch {event.epoch + 1}/{self._epochs}, loss {event.loss:.3f}, {event.rate:.0f} images/s"
        self.advance("training", self.progress.reached, sum(self.progress.work), state)

    def _evaluated(self, event: events.PhaseEvaluated) -> None:
        found = confusions_of(event.metrics)
        classes, base = range(len(event.metrics["classes"])), range(self._base)
        say(
            f"    accuracy (%) on all {len(classes)} classes: {_rates(found, classes)}; on the base classes: {_rates(found, base)}"
        )


def _rates(found: Mapping[str, Confusion], classes: Sequence[int]) -> str:
    honest = [kind for kind in CLASSIFIERS.values() if kind.name in found and not kind.oracle]
    rates = [(kind.title, finite(found[kind.name].rate(classes))) for kind in honest]
    return ", ".join(f"{title} {_number(rate)}" for title, rate in rates)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


# -------------------------------------------------------------------------------------------------------- results


def results_table(title: str, settings: Sequence[Setting]) -> Table:
    """Return what each setting reached under each classifier: with several seeds, mean and standard deviation."""
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
    """Explain the columns and signs of `results_table`."""
    words, seeds = [LEGEND], max(len(setting.runs) for setting in settings)
    if seeds > 1:
        words.append(f"mean ± standard deviation of {seeds} seeds")
    oracles = [name for name in CLASSIFIERS if is_oracle(name)]
    if any(name in setting.classifiers for setting in settings for name in oracles):
        words += [note.rstrip(".") for note in notes_on(oracles)]
    return "; ".join(words)


def _estimate(value: Estimate | None) -> str:
    if value is None or value.spread is None:
        return _number(value.mean if value else None)
    return f"{value.mean:.1f} ± {value.spread:.1f}"


# ------------------------------------------------------------------------------------------------------ many runs


@dataclass(frozen=True)
class Where:
    """Where the runs of a grid go: processes here, a Ray cluster, or SLURM."""

    jobs: Annotated[
        int | None,
        _where(
            name=("--jobs", "-j"),
            help="Runs at a time; unset: as many as cores (or GPUs) and memory allow.",
        ),
    ] = None
    ray: Annotated[
        str | None,
        _where(
            help="Run on a Ray cluster: HOST:PORT, auto (a running one, else a new one), or local."
        ),
    ] = None
    submit: Annotated[
        Literal["slurm"] | None, _where(help="Write a job array for SLURM and start nothing.")
    ] = None
    sbatch: Annotated[
        str,
        _where(
            allow_leading_hyphen=True,
            show_default=False,
            help="Further options for SLURM, such as '--partition=gpu --time=1-0'.",
        ),
    ] = ""
    allow_environment_change: Annotated[
        bool,
        _where(
            help="Resume runs that were started with another number of threads or kind of device."
        ),
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
    """Return how many runs go at a time, as far as this machine knows."""
    if not jobs or where.ray is not None or where.submit is not None:
        return 1
    return Local(jobs[0].config, where.jobs).places


def confirm(what: str, yes: bool) -> None:
    """Ask before much work; where nobody can be asked, only ``yes`` will do."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"{what}, and there is no terminal to confirm it: add --yes")
    if console.input("Start? [y/N] ", markup=False).strip().lower() not in ("y", "yes"):
        raise ConfigError("not confirmed: nothing was started")


def carry_out(jobs: Sequence[Job], where: Where, *, metric: str | None = None) -> bool:
    """Run those jobs that are not complete; return whether all the runs were carried out here.

    metric: search by it, stopping poor runs early (ASHA); unset: every run is done to its end.
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
        say(
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
    """How all the runs stand: one live table on a terminal, a line for each thing that happens elsewhere."""

    ORDER = ("running", "waiting for base", "failed", "interrupted", "complete", "waiting")

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.statuses = {job.out: status_of(job) for job in jobs}
        self.labels = {job.out: job.label for job in jobs}
        self._began: dict[Path, float] = {}
        self._took: list[float] = []
        self._running: list[Job] = []
        self._looked = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        """Show the table."""
        complete = sum(status.state == "complete" for status in self.statuses.values())
        say(f"{count(len(self.statuses), 'run')}, {complete} of them complete")
        if console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take the table away: what it showed last is said in lines."""
        self._live.stop()

    def __call__(self, running: Collection[Job]) -> None:
        """Hear which runs are under way; look at their directories once a second, and when one ends."""
        over = [job for job in self._running if job not in running]
        self._running = list(running)
        if not over and time.monotonic() - self._looked < 1:
            return
        self._looked = time.monotonic()
        for job in (*over, *running):
            self._update(job.out, status_of(job))
        for job in over:
            self._took.append(time.monotonic() - self._began.pop(job.out, time.monotonic()))
        if self._live.is_started:
            self._live.update(self.table(), refresh=True)

    def _update(self, out: Path, now: RunSummary) -> None:
        before, self.statuses[out] = self.statuses[out], now
        number = list(self.statuses).index(out) + 1
        name = f"run {number} of {len(self.statuses)}, {self.labels[out]}"
        if now.state not in ("waiting", "complete", "failed") and out not in self._began:
            self._began[out] = time.monotonic()
            say(f"{name}: {'started' if before.total is None else 'resumed'}")
        if now.state == before.state and now.done == before.done:
            return
        if now.state in ("complete", "failed", "stopped early"):
            say(f"{name}: {now.state}: {now.error or now.result or ''}")
        elif now.done > before.done:
            say(f"{name}: phase {now.done - 1} of {(now.total or 1) - 1} done: {now.result}")

    def table(self) -> Table:
        """Return the table: what runs, what failed, and how many wait or are complete."""
        states = [each.state for each in self.statuses.values()]
        rows = sorted(self.statuses.items(), key=lambda item: _rank(item[1].state))
        shown = [(self.labels[out], status) for out, status in rows[: max(3, console.height - 6)]]
        made, counts = table_of(shown), Counter(states)
        known = [f"{counts[state]} {state}" for state in self.ORDER if counts[state]]
        left = self._left(counts["waiting"])
        made.caption = ", ".join(known) + (f"; about {duration(left)} left" if left else "")
        return made

    def _left(self, waiting: int) -> float | None:
        """Estimate the seconds until all is over, from the runs that are over and those that run; None: not known yet."""
        running = [self.statuses[out].seconds_left for out in self._began]
        known = [left for left in running if left is not None]
        if not running or len(known) < len(running):
            return None
        each = sum(self._took) / len(self._took) if self._took else max(known)
        return max(*known, (sum(known) + waiting * each) / len(known))


def _rank(state: str) -> int:
    return Board.ORDER.index(state) if state in Board.ORDER else Board.ORDER.index("complete")


def table_of(rows: Sequence[tuple[str, RunSummary]]) -> Table:
    """Return a table of runs by their labels: how far they are, how good so far, how long they will take."""
    made = table(
        "run", "state", "phase", "accuracy so far, or error", "left", caption_justify="left"
    )
    for label, status in rows:
        counted = f"{status.done}/{status.total}" if status.total else ""
        left = "" if status.seconds_left is None else duration(status.seconds_left)
        words = status.error or status.result or ""
        made.add_row(*map(plain, (label, status.state, counted, words, left)))
    return made
