"""A search that stops poor runs early: Ray Tune's ASHA compares runs after some phases and continues the better half.

The runs and their directories are those of a random search; all nodes must share the disk of these directories.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from geodl.bench.sweep.cluster import RETRIES, connect, resources, wait_for_lock
from geodl.bench.sweep.jobs import FOLDER, Job, completed
from geodl.bench.sweep.runner import STOPPED, TURN, Notify, Process, launch
from geodl.bench.sweep.status import METRICS, value_of, worst
from geodl.config import RunConfig
from geodl.core.errors import Interrupted
from geodl.core.files import atomic_write, unlink
from geodl.store import Directory

FIRST = 2
"""Phases that every run completes: the base phase and one with new classes."""
SHARE = 2
"""The reduction factor: one of this many runs continues."""


def search(
    jobs: list[Job], address: str, metric: str, *, notify: Notify, stop: Callable[[], bool]
) -> dict[Job, str]:
    """Run the jobs as trials; return the errors of failed ones. Jobs stopped early are marked by a file."""
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"  # Ctrl-C is handled by `stop`
    connect(address)
    for job in jobs:
        job.prepare()
    halt = jobs[0].out.parent.resolve() / FOLDER / "stopping"
    unlink(halt)
    results = _tuner(jobs, metric, halt, _watch(jobs, halt, notify, stop)).fit()
    if halt.exists():
        unlink(halt)
        raise Interrupted(STOPPED)
    return _failures(jobs, results)


def _tuner(jobs: list[Job], metric: str, halt: Path, watch: Any) -> Any:
    """Return a Tuner that runs the jobs as trials until all have ended or the file `halt` exists."""
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    takes = resources(jobs[0].config)
    kind = tune.with_resources(
        _trial(jobs, metric, halt), {"cpu": takes["num_cpus"], "gpu": takes.get("num_gpus", 0)}
    )
    longest = max(_phases(job.config) for job in jobs)
    scheduler = ASHAScheduler(
        max_t=longest, grace_period=min(FIRST, longest), reduction_factor=SHARE
    )
    mode = "max" if METRICS[metric] > 0 else "min"
    return tune.Tuner(
        kind,
        param_space={"job": tune.grid_search(list(range(len(jobs))))},
        tune_config=tune.TuneConfig(metric="value", mode=mode, scheduler=scheduler),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(halt.parent),
            verbose=0,
            callbacks=[watch],
            stop=_stopper(halt),
            failure_config=tune.FailureConfig(max_failures=RETRIES),
            checkpoint_config=tune.CheckpointConfig(
                checkpoint_at_end=False
            ),  # runs write their own checkpoints
        ),
    )


def _phases(config: RunConfig) -> int:
    return len(config.groups) if config.groups else config.phases + 1


def _failures(jobs: Sequence[Job], results: Iterable[Any]) -> dict[Job, str]:
    """Return the errors of failed jobs; mark these and those that were stopped early."""
    failed: dict[Job, str] = {}
    for position, result in enumerate(results):
        # A trial lost before its first step has no metrics, but results are in the order of the jobs.
        metrics = result.metrics or {}
        job = jobs[metrics.get("config", {}).get("job", position)]
        if job.complete():
            continue
        lost = str(result.error or "").strip().splitlines()
        if error := f"Ray: {lost[-1]}" if lost else metrics.get("failed"):
            failed[job] = error
            atomic_write(job.file("error"), error.encode())
        else:
            atomic_write(job.file("stopped"), b"")
    return failed


def _trial(jobs: list[Job], metric: str, halt: Path) -> type[Any]:
    """Return the class of a trial: a process that does a run, and reports its metric after each phase."""
    from ray import tune

    launches = [(job.out, launch(job)) for job in map(Job.resolved, jobs)]
    cwd = Path.cwd()

    class Trial(tune.Trainable):  # type: ignore[misc]
        """A run; each step is a phase."""

        def setup(self, config: Mapping[str, int]) -> None:
            self.out, start = launches[config["job"]]
            wait_for_lock(self.out)
            self.process = Process(start._replace(cwd=cwd))

        def step(self) -> dict[str, Any]:
            phase = self.iteration + 1
            while completed(self.out) < phase and self._runs() and not halt.exists():
                time.sleep(TURN)
            if completed(self.out) < phase:
                return {"value": worst(metric), "failed": self.process.result() or "", "done": True}
            last = phase == Directory(self.out).phases
            while last and self._runs():  # until it has written its report
                time.sleep(TURN)
            value = value_of(self.out, metric, phase)
            value = worst(metric) if value is None else value
            return {"value": value, "failed": "", "done": last}

        def _runs(self) -> bool:
            return self.process.result() is None

        def cleanup(self) -> None:
            self.process.stop()
            while self._runs():
                time.sleep(TURN)

    return Trial


def _watch(jobs: list[Job], halt: Path, notify: Notify, stop: Callable[[], bool]) -> Any:
    """Return a callback that reports which jobs run, and creates the file `halt` when `stop` returns True."""
    from ray import tune

    class Watch(tune.Callback):  # type: ignore[misc]
        def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
            notify([jobs[trial.config["job"]] for trial in trials if trial.status == "RUNNING"])
            if stop() and not halt.exists():
                atomic_write(halt, b"")

    return Watch()


def _stopper(halt: Path) -> Any:
    """Return a stopper that ends all trials once the file `halt` exists."""
    from ray import tune

    class Stop(tune.Stopper):  # type: ignore[misc]
        def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
            return False

        def stop_all(self) -> bool:
            return halt.exists()

    return Stop()
