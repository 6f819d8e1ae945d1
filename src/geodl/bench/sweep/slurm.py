"""Runs as a SLURM job array: each task is a `geodl run` command, which resumes when it is requeued."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from geodl.bench.sweep.jobs import FOLDER, Job
from geodl.bench.sweep.runner import launch
from geodl.config import RunConfig
from geodl.core.files import atomic_write

WARNING = 120
"""Seconds before its time limit at which a run is interrupted, so that it saves its progress."""


def write(jobs: Sequence[Job], options: Sequence[str] = ()) -> Path:
    """Write the job array; return the script for `sbatch`.

    options: further options of sbatch, such as --partition=gpu and --time=1-00:00:00.
    """
    config, folder = jobs[0].config, jobs[0].out.parent.resolve() / FOLDER
    lines = []
    for job in jobs:
        job.prepare()
        command = [sys.executable, "-m", "geodl", *launch(job.resolved()).arguments]
        lines.append(shlex.quote(shlex.join(command)))
    resources = [f"--array=1-{len(jobs)}", f"--output={folder}/array-%A-%a.log"]
    resources += _resources(config)
    text = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in (*resources, *options)),
        "# Part of the script because SLURM keeps a copy of it, whatever is submitted later.",
        "commands=(",
        *lines,
        ")",
        f"cd {shlex.quote(str(Path.cwd()))} || exit 1",
        f"export OMP_NUM_THREADS={config.threads or 1}",
        'srun bash -c "${commands[SLURM_ARRAY_TASK_ID - 1]}"',
        "status=$?",
        "# The time limit was reached and progress is saved: requeue, the same command resumes.",
        '[ "$status" = 130 ] && scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"',
        'exit "$status"',
        "",
    ]
    script = folder / "array.sbatch"
    atomic_write(script, "\n".join(text).encode())
    return script


def _resources(config: RunConfig) -> list[str]:
    """Return the options of sbatch for the resources of each run."""
    gpus = [f"--gpus-per-node={config.devices}"] if config.accelerator == "cuda" else []
    return [
        "--job-name=geodl",
        f"--nodes={config.nodes}",
        f"--ntasks-per-node={config.devices}",
        f"--cpus-per-task={config.threads or 1}",
        *gpus,
        "--requeue",
        f"--signal=INT@{WARNING}",
        "--open-mode=append",
    ]
