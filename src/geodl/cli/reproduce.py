"""``geodl reproduce``: the paper's tables and figures by one command."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from cyclopts import Parameter

from geodl.bench.experiment import load_data
from geodl.bench.paper import beyond, estimate, outputs
from geodl.bench.paper.grid import ARTEFACTS, Length, Planned, choose, grid
from geodl.cli.display import console, echo, progress_bar
from geodl.cli.grids import Where, carry_out, confirm, places
from geodl.config import RunConfig
from geodl.core.errors import ConfigError, TrainingError
from geodl.core.events import Event, FeaturesTaken
from geodl.core.text import count, duration
from geodl.learning.timing import TURNS, measure

HOUR = 3600.0
RUNS = 3


def reproduce(
    what: Annotated[str, Parameter(help=f"{', '.join(ARTEFACTS)}, all, or beyond.")],
    /,
    *,
    dataset: Literal["cifar100", "imagenet-subset", "imagenet"] | None = None,
    length: Length = "paper",
    phases: Annotated[list[int] | None, Parameter(consume_multiple=True)] = None,
    runs: int = RUNS,
    out: Path | None = None,
    data_dir: Path | None = None,
    threads: int | None = None,
    weights: Path | None = None,
    views: Literal["mirror", "mirror,shift"] = "mirror",
    dry_run: bool = False,
    yes: bool = False,
    where: Where = Where(),  # noqa: B008  # frozen
) -> None:
    """Run what a table or figure of the paper needs, and write it beside the published numbers.

    Args:
        dataset: The dataset; unset: the first for which the paper has this table or figure.
        length: paper: the full schedule; cpu: a short one (CIFAR-100); smoke: minutes, on digits.
        phases: Numbers of phases T; unset: all that the paper has.
        runs: Runs of each training, with the seeds 1, 2, ...: intervals need 3 or more.
        out: Directory of the runs, tables and figures; unset: reproduced/DATASET-LENGTH.
        data_dir: Directory of the data.
        threads: CPU threads of each run; unset: one.
        weights: beyond: a file with a backbone that was trained on the 50 base classes.
        views: beyond: the views of a test image whose scores are averaged, beside the row with one view; shift: also moved by
            two pixels to the four corners.
        dry_run: Print the runs and an estimate of their time, run nothing; needs no data.
        yes: Start without asking, however long it takes.
    """
    machine = {"data_dir": data_dir, "threads": threads}
    if what == "beyond":
        given = {"dataset": dataset, "length": length, "runs": runs, "dry_run": dry_run}
        _refuse(given | vars(where))
        config = beyond.beyond_config(weights, machine)
        _beyond(config, phases, views, out or Path("reproduced") / "beyond")
        return
    if weights is not None or views != "mirror":
        raise ConfigError("weights, views: used by `geodl reproduce beyond` alone")
    source, chosen = choose(what, dataset, phases)
    out = out or Path("reproduced") / f"{source}-{length}"
    jobs = grid(chosen, source, length, out / "runs", runs=runs, options=machine)
    torch.set_num_threads(threads or 1)
    if not dry_run and where.here and not all(job.complete() for job in jobs):
        load_data(jobs[0].config)  # missing data are reported before the confirmation
    seconds = _announce(jobs, dry_run, places(where, jobs))
    if dry_run:
        return
    if seconds > HOUR and where.submit is None:
        confirm(f"this would take about {duration(seconds)}", yes)
    try:
        written = carry_out(jobs, where)
    except TrainingError:
        _write(jobs, chosen, source, length, out)  # results of the other runs
        raise
    if written:
        _write(jobs, chosen, source, length, out)


def _refuse(given: dict[str, Any]) -> None:
    """Raise an error for options that `beyond` does not use."""
    defaults: dict[str, Any] = {"dataset": None, "length": "paper", "runs": RUNS, "dry_run": False}
    defaults |= {option.name: option.default for option in fields(Where)}
    names = [f"--{name.replace('_', '-')}" for name in given if given[name] != defaults[name]]
    if names:
        raise ConfigError(f"{', '.join(names)}: not used by `geodl reproduce beyond`")


def _announce(jobs: list[Planned], dry_run: bool, at_a_time: int) -> float:
    """Print and return an estimate of the grid's time in seconds; in a dry run, also print that of each run."""
    done = [job.done() for job in jobs]
    left = sum(phases <= job.config.phases for job, phases in zip(jobs, done, strict=True))
    if not left:
        echo(f"{count(len(jobs), 'run')}, all complete")
        return 0.0
    shape, works = estimate.shape_of(jobs[0].config), estimate.plan(jobs, done)
    speed = measure(shape)
    total, images = 0.0, 0
    for number, (job, work) in enumerate(zip(jobs, works, strict=True), start=1):
        seconds = sum(estimate.seconds(job.config, work, speed))
        total += seconds / at_a_time
        images += sum(phase.trained for phase in work)
        if dry_run:
            complete = done[number - 1] > job.config.phases
            state = "complete" if complete else f"about {duration(seconds)}"
            echo(f"{number:3d}  {job.label}  ({state}; {', '.join(job.artefacts)})")
    slow, fast = min(speed.training.values()), max(speed.training.values())
    echo(
        f"{count(len(jobs), 'run')}, {left} of them not complete, {images:,} images to train on: about {duration(total)}"
        f"{f', {at_a_time} at a time' if at_a_time > 1 else ''}. An estimate from {TURNS} timed steps of {shape.network} with each "
        f"loss, threads: {torch.get_num_threads()}, precision: {shape.precision} ({slow:.0f} to {fast:.0f} images/s); "
        "without the time to read image files, and with no base phase from the cache."
    )
    return total


def _write(
    jobs: list[Planned], chosen: dict[str, tuple[int, ...]], source: str, length: Length, out: Path
) -> None:
    """Write the tables and figures from the complete runs."""
    settings = outputs.read(jobs)
    for name, some in chosen.items():
        files = outputs.write(name, source, length, some, settings, out)
        echo(f"{name}: {', '.join(map(str, files))}")
    if settings:
        echo(f"a page about the runs: geodl report {out / 'runs'}/* --out {out / 'report.html'}")


def _beyond(config: RunConfig, phases: list[int] | None, views: str, out: Path) -> None:
    """Learn the protocols in closed form and write the table."""
    data, readings = load_data(config), beyond.READINGS[views]
    copies = len({view for reading in readings.values() for view in reading.tested})
    with progress_bar(console) as bar:
        total = copies * (len(data.train) + len(data.test))
        task, read = bar.add_task("  reading images", total=total, state=""), 0

        def show(event: Event) -> None:
            nonlocal read
            if isinstance(event, FeaturesTaken):
                bar.update(task, completed=read + event.done)
                read += event.total if event.done == event.total else 0

        found = beyond.beyond(config, data, phases or beyond.PHASES, readings, show)
    table = beyond.headline({t: [results] for t, results in found.items()})
    files = table.write(out / "beyond", f"Beyond the paper: {Path(str(config.weights)).name}")
    for line in [*table.markdown().splitlines(), f"beyond: {', '.join(map(str, files))}"]:
        echo(line)
