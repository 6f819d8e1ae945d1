"""Runs as a SLURM job array: one line of a file a run, each a `geodl run` command, so that a job put back goes on exactly."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from geodl.config import RunConfig
from geodl.files import atomic_write
from geodl.sweep.jobs import FOLDER, Job, same_shape
from geodl.sweep.runner import arguments, prepare

WARNING = 120
"""Seconds before the end of its time in which a run is told to save its progress."""


def write(jobs: Sequence[Job], options: Sequence[str] = (), *, allow_environment_change: bool = False) -> Path:
    """Write the job array; return the file for `sbatch`.

    options: further options of sbatch, such as --partition=gpu and --time=1-00:00:00.
    """
    config, folder = same_shape(jobs), jobs[0].out.parent.resolve() / FOLDER
    for job in jobs:
        prepare(job)
    commands = [arguments(job.file("toml").resolve(), job.out.resolve(), allow_environment_change) for job in jobs]
    lines, script = folder / "array.txt", folder / "array.sbatch"
    geodl = [sys.executable, "-m", "geodl"]
    atomic_write(lines, "".join(f"{shlex.join([*geodl, *command])}\n" for command in commands).encode())
    header = [f"#SBATCH {option}" for option in [*_resources(config, len(jobs), folder), *options]]
    atomic_write(script, "\n".join(["#!/bin/bash", *header, *_body(config, lines), ""]).encode())
    return script


def _resources(config: RunConfig, count: int, folder: Path) -> list[str]:
    return [
        "--job-name=geodl",
        f"--array=1-{count}",
        f"--nodes={config.nodes}",
        f"--ntasks-per-node={config.devices}",
        f"--cpus-per-task={config.threads or 1}",
        *([f"--gpus-per-node={config.devices}"] if config.accelerator == "cuda" else []),
        "--requeue",
        f"--signal=INT@{WARNING}",
        "--open-mode=append",
        f"--output={folder}/array-%a.log",
    ]


def _body(config: RunConfig, lines: Path) -> list[str]:
    return [
        f"cd {shlex.quote(str(Path.cwd()))} || exit 1",
        f"export OMP_NUM_THREADS={config.threads or 1}",
        f'srun bash -c "$(sed -n "${{SLURM_ARRAY_TASK_ID}}p" {shlex.quote(str(lines))})"',
        "status=$?",
        "# Its time was over and its progress is saved: back into the queue, where the same line goes on.",
        '[ "$status" = 130 ] && scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"',
        'exit "$status"',
    ]
