"""``geodl reproduce``: the paper's tables and figures by one command."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal

import torch
from cyclopts import Parameter

from geodl.cli.display import console, progress_bar, say
from geodl.cli.many import Where, carry_out, confirm, places
from geodl.errors import ConfigError, TrainingError
from geodl.events import Event, FeaturesTaken
from geodl.experiment import load_data
from geodl.report.results import DATA_NAMES
from geodl.reproduce import beyond, estimate, outputs, steps
from geodl.reproduce.grid import ARTEFACTS, Length, Planned, Training, choose, config_of, grid
from geodl.text import count, duration

HOUR = 3600.0
RUNS = 3
TURNS = {"paper": 30, "cpu": 30, "smoke": 5}


def reproduce(
    what: Annotated[
        str, Parameter(help=f"{', '.join(ARTEFACTS)}, all, or beyond: the closed form over given weights.")
    ],
    /,
    *,
    dataset: Literal["cifar100", "imagenet-subset", "imagenet"] | None = None,
    length: Length = "paper",
    phases: Annotated[list[int] | None, Parameter(consume_multiple=True, negative=())] = None,
    runs: int = RUNS,
    out: Path | None = None,
    data_dir: Path | None = None,
    threads: int | None = None,
    weights: Path | None = None,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    yes: Annotated[bool, Parameter(negative=())] = False,
    where: Annotated[Where, Parameter(name="*")] = Where(),  # noqa: B008  # frozen
) -> None:
    """Run what a table or figure of the paper needs, and write it beside the published numbers.

    Parameters
    ----------
    dataset
        The dataset; unset: the first that the paper has this table or figure for.
    length
        paper: the full schedule; cpu: a short one (CIFAR-100); smoke: minutes, on digits.
    phases
        Numbers of phases T; unset: all that the paper has.
    runs
        Runs of each training, with the seeds 1, 2, ...: intervals need 3 or more.
    out
        Directory of the runs, tables and figures; unset: reproduced/DATASET-LENGTH.
    data_dir
        Where the data are.
    threads
        CPU threads of each run; unset: one.
    weights
        beyond: a file with a backbone that was trained on the 50 base classes.
    dry_run
        Print the runs and an estimate of their time, run nothing; needs no data.
    yes
        Start without asking, however long it takes.
    """
    if what == "beyond":
        _refuse(where, dataset=dataset is not None, length=length != "paper", runs=runs != RUNS, dry_run=dry_run)
        _beyond(weights, phases, data_dir, threads, out or Path("reproduced") / "beyond")
        return
    if weights is not None:
        raise ConfigError(f"weights = {weights}: used by `geodl reproduce beyond` alone")
    source, chosen = choose(what, dataset, phases)
    out = out or Path("reproduced") / f"{source}-{length}"
    jobs = grid(chosen, source, length, out / "runs", runs=runs, data_dir=data_dir, threads=threads)
    torch.set_num_threads(threads or 1)
    if not dry_run and where.here and not all(job.complete() for job in jobs):
        load_data(jobs[0].config)  # before a person is asked to wait
    shape = _shape(source, length) if "time-memory" in chosen else None
    seconds = _announce(jobs, shape, length, dry_run, places(where, jobs))
    if dry_run:
        return
    if seconds > HOUR and where.submit is None:
        confirm(f"this would take about {duration(seconds)}", yes)
    failed = None
    try:
        if not carry_out(jobs, where):
            return
    except TrainingError as error:
        failed = error
    settings = outputs.read(jobs)
    for name, some in chosen.items():
        if shape is not None and name == "time-memory":
            files = _time_memory(source, shape, TURNS[length], out)
        else:
            files = outputs.write(name, source, length, some, settings, out)
        say(f"{name}: {', '.join(str(path) for path in files)}")
    if settings:
        say(f"a page about the runs: geodl report {out / 'runs'}/* --out {out / 'report.html'}")
    if failed is not None:
        raise failed


def _refuse(where: Where, **given: bool) -> None:
    """Raise an error for options that `beyond` has no use for."""
    given |= {option.name: getattr(where, option.name) != option.default for option in fields(where)}
    if names := [f"--{name.replace('_', '-')}" for name, is_given in given.items() if is_given]:
        raise ConfigError(f"{', '.join(names)}: not used by `geodl reproduce beyond`")


def _beyond(
    weights: Path | None, phases: list[int] | None, data_dir: Path | None, threads: int | None, out: Path
) -> None:
    """Learn the protocols in closed form and write the table."""
    if weights is None:
        raise ConfigError("beyond needs --weights FILE: a backbone that was trained on the 50 base classes")
    config = beyond.beyond_config(weights, {"data_dir": data_dir, "threads": threads})
    data = load_data(config)
    with progress_bar(console) as bar:
        task = bar.add_task("  reading images", total=2 * (len(data.train) + len(data.test)), state="")
        read = 0

        def show(event: Event) -> None:
            nonlocal read
            if isinstance(event, FeaturesTaken):
                bar.update(task, completed=read + event.done)
                read += event.total if event.done == event.total else 0

        found = beyond.beyond(config, data, phases or beyond.PHASES, show)
    table = beyond.headline(
        {t: [{name: each.to_dict() for name, each in classifiers.items()}] for t, classifiers in found.items()}
    )
    files = table.write(out / "beyond", f"Beyond the paper: {weights.name}")
    for line in [*table.markdown().splitlines(), f"beyond: {', '.join(map(str, files))}"]:
        say(line)


def _announce(jobs: list[Planned], shape: steps.Shape | None, length: Length, dry_run: bool, at_a_time: int) -> float:
    """Print the grid and the estimate of its time; return that in seconds."""
    done = [job.done() for job in jobs]
    left = sum(phases <= job.config.phases for job, phases in zip(jobs, done, strict=True))
    if jobs and not left:
        say(f"{count(len(jobs), 'run')}, all complete")
    measured = estimate.shape_of(jobs[0].config) if left else shape
    if measured is None:
        return 0.0
    speed = estimate.measure(measured)
    works = estimate.plan(jobs, done)
    times = [estimate.seconds(job.config, each, speed) for job, each in zip(jobs, works, strict=True)]
    if dry_run:
        for number, (job, phases, each) in enumerate(zip(jobs, done, times, strict=True), start=1):
            state = "complete" if phases > job.config.phases else f"about {duration(sum(each))}"
            say(f"{number:3d}  {job.label}  ({state}; {', '.join(job.artefacts)})")
    steps_take = estimate.steps_seconds(shape, TURNS[length], speed) if shape else 0.0
    slow, fast = min(speed.training.values()), max(speed.training.values())
    images = sum(phase.trained for each in works for phase in each)
    what = [f"{count(len(jobs), 'run')}, {left} of them not complete, {images:,} images to train on"] if jobs else []
    what += ["timed steps"] if shape else []
    total = sum(map(sum, times)) / at_a_time + steps_take
    say(
        f"{' and '.join(what)}: about {duration(total)}{f', {at_a_time} at a time' if at_a_time > 1 else ''}. An estimate from "
        f"{estimate.STEPS} timed steps of {measured.network} with each loss on {steps.device().type}, "
        f"threads: {torch.get_num_threads()}, precision: {measured.precision} ({slow:.0f} to {fast:.0f} images/s); reading image files is not counted, and base "
        "phases that the cache has make it shorter."
    )
    return total


def _shape(dataset: str, length: Length) -> steps.Shape:
    """Return what the steps of time-memory work on: the dataset's network and images."""
    training = Training("finetune", "geodesic", 50, 10)
    return estimate.shape_of(config_of(training, dataset, length, seed=1, data_dir=None, threads=None))


def _time_memory(dataset: str, shape: steps.Shape, turns: int, out: Path) -> list[Path]:
    """Measure steps and write their table."""
    about = f"{shape.network}, {shape.size} x {shape.size} images, batch {shape.batch}, precision {shape.precision}"
    say(f"timing steps: {about}")
    times = steps.time_steps(shape, turns)
    peaks = {name: steps.peak(name, shape) for name in steps.LOSSES}
    about += f", {steps.device().type}, threads: {torch.get_num_threads()}"
    title = f"{ARTEFACTS['time-memory'].title} ({DATA_NAMES[dataset]})"
    return outputs.time_memory(times, peaks, about).write(out / "time-memory", title)
