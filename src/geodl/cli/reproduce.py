"""``geodl reproduce``: the paper's tables and figures by one command."""

import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import torch
from cyclopts import Parameter
from rich.markup import escape

from geodl.cli.display import Stopper, Watch, console, say
from geodl.data.sources import Dataset
from geodl.devices import available_cores
from geodl.errors import ConfigError, TrainingError
from geodl.events import Event, PhaseEvaluated, StepTaken, part_of
from geodl.experiment import load_data
from geodl.report.results import DATA_NAMES
from geodl.reproduce import estimate, outputs, steps
from geodl.reproduce.grid import ARTEFACTS, Job, Length, Training, choose, config_of, grid
from geodl.store import RunDirectory
from geodl.sweep.runner import run_job
from geodl.text import duration

HOUR = 3600.0
TURNS = {"paper": 30, "cpu": 30, "smoke": 5}


def reproduce(
    what: Annotated[str, Parameter(help=f"{', '.join(ARTEFACTS)}, or all.")],
    /,
    *,
    dataset: Literal["cifar100", "imagenet-subset", "imagenet"] | None = None,
    length: Length = "paper",
    phases: Annotated[list[int] | None, Parameter(consume_multiple=True, negative=())] = None,
    runs: int = 3,
    out: Path | None = None,
    data_dir: Path | None = None,
    threads: int | None = None,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    yes: Annotated[bool, Parameter(negative=())] = False,
    allow_environment_change: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Run what a table or figure of the paper needs, and write it beside the published numbers.

    Parameters
    ----------
    dataset
        Unset: the first that the paper has it for.
    length
        paper: the full schedule; cpu: a short one (CIFAR-100); smoke: minutes, on digits.
    phases
        Numbers of phases T; unset: all that the paper has.
    runs
        Seeds: 1, 2, ...
    out
        Directory of the runs, tables and figures; unset: reproduced/DATASET-LENGTH.
    data_dir
        Where the data are.
    threads
        CPU threads; unset: the cores there are (smoke: one).
    dry_run
        Print the runs and an estimate of their time, run nothing; needs no data.
    yes
        Start without asking, however long it takes.
    allow_environment_change
        Go on with runs that were begun with another number of threads or kind of device.
    """
    source, chosen = choose(what, dataset, phases)
    jobs = grid(chosen, source, length, runs=runs, data_dir=data_dir, threads=threads)
    out = out or Path("reproduced") / f"{source}-{length}"
    torch.set_num_threads(threads or (1 if length == "smoke" else available_cores()))
    done = [_done(out / "runs" / job.name) for job in jobs]
    pending = any(count <= job.config.phases for job, count in zip(jobs, done, strict=True))
    data = load_data(jobs[0].config) if pending and not dry_run else None  # before a person is asked to wait
    shape = _shape(source, length) if "time-memory" in chosen else None
    times, steps_take = _announce(jobs, done, shape, length, dry_run)
    if dry_run:
        return
    confirm(sum(map(sum, times)) + steps_take, yes, sys.stdin.isatty())
    failed = _run_all(jobs, times, out / "runs", data, allow_environment_change) if data else []
    settings = outputs.read(jobs, out / "runs")
    for name, some in chosen.items():
        if shape is not None and name == "time-memory":
            files = _time_memory(source, shape, TURNS[length], out)
        else:
            files = outputs.write(name, source, length, some, settings, out)
        say(f"{name}: {', '.join(str(path) for path in files)}")
    if settings:
        say(f"a page about the runs: geodl report {out / 'runs'}/* --out {out / 'report.html'}")
    if failed:
        raise TrainingError(f"{len(failed)} of {len(jobs)} runs failed; the first: {failed[0]}")


def confirm(seconds: float, yes: bool, terminal: bool) -> None:
    """Ask before more than an hour of work; where nobody can be asked, only ``yes`` will do."""
    if seconds <= HOUR or yes:
        return
    if not terminal:
        raise ConfigError(
            f"this would take about {duration(seconds)}, and there is no terminal to confirm it: add --yes"
        )
    if console.input("Start? [y/N] ", markup=False).strip().lower() not in ("y", "yes"):
        raise ConfigError("not confirmed: nothing was started")


def _done(path: Path) -> int:
    return RunDirectory(path).completed() if (path / "config.json").exists() else 0


def _announce(
    jobs: list[Job], done: list[int], shape: steps.Shape | None, length: Length, dry_run: bool
) -> tuple[list[list[float]], float]:
    """Print the grid and the estimate of its time.

    Return the estimated seconds of each phase of each job, and those of the steps that are timed for their own sake.
    """
    left = sum(count <= job.config.phases for job, count in zip(jobs, done, strict=True))
    if jobs and not left:
        say(f"{len(jobs)} runs, all complete")
    config = jobs[0].config if left else None
    if shape is None and config is None:
        return [[0.0] for _ in jobs], 0.0
    measured = estimate.shape_of(config) if config else shape
    assert measured is not None
    speed = estimate.measure(measured)
    times = estimate.plan(jobs, done, speed)
    if dry_run:
        for number, (job, count, each) in enumerate(zip(jobs, done, times, strict=True), start=1):
            state = "complete" if count > job.config.phases else f"about {duration(sum(each))}"
            say(f"{number:3d}  {job.label}  ({state}; {', '.join(job.artefacts)})")
    steps_take = estimate.steps_seconds(shape, TURNS[length], speed) if shape else 0.0
    slow, fast = min(speed.training.values()), max(speed.training.values())
    what = [f"{len(jobs)} runs, {left} of them not complete"] if jobs else []
    what += ["timed steps"] if shape else []
    say(
        f"{' and '.join(what)}: about {duration(sum(map(sum, times)) + steps_take)}. An estimate from "
        f"{estimate.STEPS} timed steps of {measured.network} with each loss on {steps.device().type}, "
        f"threads: {torch.get_num_threads()} ({slow:.0f} to {fast:.0f} images/s); reading image files is not counted, and base "
        "phases that the cache has make it shorter."
    )
    return times, steps_take


def _run_all(
    jobs: list[Job], times: list[list[float]], runs: Path, data: Dataset, allow_environment_change: bool
) -> list[str]:
    """Run what is not complete, with a bar over the whole grid; return the runs that failed and why: others go on."""
    total = sum(map(sum, times))
    started, passed, failed = time.monotonic(), 0.0, []
    todo = [
        (number, job, each) for number, (job, each) in enumerate(zip(jobs, times, strict=True), start=1) if sum(each)
    ]
    stopper = Stopper()
    with stopper.watching():
        for number, job, each in todo:
            spent = time.monotonic() - started
            left = (total - passed) * (spent / passed if passed else 1.0)  # as fast as it went so far
            say(f"run {number} of {len(jobs)}, about {duration(left)} left: {job.label}")
            watch = GridWatch(job, each, passed, total, f"run {number} of {len(jobs)}")
            with watch.shown():
                error = run_job(
                    job.config,
                    runs / job.name,
                    data=data,
                    listener=watch,
                    stop=stopper,
                    allow_environment_change=allow_environment_change,
                )
            if error:
                failed.append(f"{job.label}: {error}")
                say(f"  failed: {error}")
            passed += sum(each)
    return failed


class GridWatch(Watch):
    """Shows a run, and below it how far the whole grid is, in estimated seconds."""

    def __init__(self, job: Job, times: list[float], before: float, total: float, state: str) -> None:
        super().__init__(f"{job.config.method} + {job.config.distill}")
        self.times, self.before = times, before
        self._all = self.bar.add_task("  all runs", total=total, state=escape(state))
        self.bar.update(self._all, completed=before)

    def __call__(self, event: Event) -> None:
        """Hear what happens."""
        super().__call__(event)
        if isinstance(event, StepTaken | PhaseEvaluated):
            self.bar.update(self._all, completed=self.before + self.passed(event))

    def passed(self, event: StepTaken | PhaseEvaluated) -> float:
        """Return the estimated seconds of this run that are over; stages after the first count as the end of the phase."""
        part = part_of(event, self.stage) if isinstance(event, StepTaken) and event.stage == "train" else 1.0
        return sum(self.times[: event.phase]) + part * self.times[event.phase]


def _shape(dataset: str, length: Length) -> steps.Shape:
    """Return what the steps of time-memory work on: the dataset's network and images."""
    training = Training("finetune", "geodesic", 50, 10)
    return estimate.shape_of(config_of(training, dataset, length, seed=1, data_dir=None, threads=None))


def _time_memory(dataset: str, shape: steps.Shape, turns: int, out: Path) -> list[Path]:
    """Measure steps and write their table."""
    about = f"{shape.network}, {shape.size} x {shape.size} images, batch {shape.batch}"
    say(f"timing steps: {about}")
    times = steps.time_steps(shape, turns)
    peaks = {name: steps.peak(name, shape) for name in steps.LOSSES}
    about += f", {steps.device().type}, threads: {torch.get_num_threads()}"
    title = f"{ARTEFACTS['time-memory'].title} ({DATA_NAMES[dataset]})"
    return outputs.time_memory(times, peaks, about).write(out / "time-memory", title)
