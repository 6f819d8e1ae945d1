"""Searches: what is drawn, which is best, trials that fail."""

import math
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from tests.helpers.command import geodl
from tests.helpers.runs import DIGITS, seeds

from geodl.bench.experiment import run_config
from geodl.bench.sweep import asha, status
from geodl.bench.sweep.jobs import draws, jobs_in, parse_over
from geodl.bench.sweep.status import value_of
from geodl.cli import sweep as sweep_command


def test_draws_are_of_their_ranges_and_more_trials_begin_with_the_fewer():
    over = parse_over(
        ["lr=log:0.01:0.3", "geodesic-weight=1:20", "epochs=1:3", "schedule=step,onecycle"]
    )
    found = draws(over, 200, seed=1)
    assert found[:50] == draws(over, 50, seed=1)
    assert found[:50] != draws(over, 50, seed=2)
    assert all(0.01 <= each["lr"] <= 0.3 and 1 <= each["geodesic_weight"] <= 20 for each in found)
    assert {each["epochs"] for each in found} == {1, 2, 3}
    assert {each["schedule"] for each in found} == {"step", "onecycle"}
    # Half of a logarithmic range lies below its geometric mean, 0.0548; of a plain one below the middle.
    assert 70 < sum(each["lr"] < 0.0548 for each in found) < 130
    assert 70 < sum(each["geodesic_weight"] < 10.5 for each in found) < 130


def test_whole_numbers_are_drawn_evenly_with_both_ends():
    found = draws({"exemplars": "1:3", "epochs": "log:0.5:3.5"}, 3000, seed=1)
    evenly, by_size = (Counter(each[key] for each in found) for key in ("exemplars", "epochs"))
    assert all(900 < evenly[number] < 1100 for number in (1, 2, 3))
    # By the logarithm a number n has the share of n to n + 1.
    assert all(abs(by_size[n] - 3000 * math.log(1 + 1 / n, 4)) < 100 for n in (1, 2, 3))
    assert evenly.total() == by_size.total() == 3000


def test_random_search_shows_the_best_first(tmp_path, monkeypatch):
    search = "--search random --trials 2 --over lr=log:0.0001:0.1 -j 1"
    order = ["sweep", *DIGITS, *search.split()]
    said = geodl(*order, cwd=tmp_path).stdout
    assert "on Ray (--ray auto), --search asha stops poor runs after early phases" in said
    paths = sorted(job.out for job in jobs_in(tmp_path / "runs"))
    values = [value_of(path, "average") for path in paths]
    assert f"best average: {max(values):.2f} of LUCIR, lr " in said
    assert geodl(*order, cwd=tmp_path).stdout.count("started") == 0
    known = dict(zip([path.name for path in paths], (None, 30.0), strict=True))
    for measured, said in ((known, "30.00"), (dict.fromkeys(known), "unknown")):
        for module in (sweep_command, status):
            monkeypatch.setattr(module, "value_of", lambda out, _, by=measured: by[out.name])
        shown = geodl(*order, "--metric", "forgetting", cwd=tmp_path).stdout
        assert f"best forgetting: {said} of " in shown


@pytest.fixture
def tune(monkeypatch):
    """Stand-ins for Ray Tune: each trial takes one step, except for the second, which is lost before it."""
    told = []

    class Tuner:
        def __init__(self, kind, *, param_space, **_):
            self.kind, self.jobs = kind, param_space["job"]

        def fit(self):
            return [self.result(job) for job in self.jobs]

        def result(self, job):
            if job == 1:
                error = RuntimeError("on node 7\nthe worker died")
                return SimpleNamespace(metrics=None, error=error)
            trial = self.kind()
            trial.setup({"job": job})
            told.append(trial.step())
            return SimpleNamespace(metrics=told[-1] | {"config": {"job": job}}, error=None)

    configs = "TuneConfig RunConfig FailureConfig CheckpointConfig".split()
    any_of = dict.fromkeys(configs, SimpleNamespace)
    trainable = type("Trainable", (), {"iteration": 0})
    bases = {"Trainable": trainable, "Callback": object, "Stopper": object}
    calls = {"Tuner": Tuner, "grid_search": list, "with_resources": lambda kind, _: kind}
    tune = SimpleNamespace(**any_of, **bases, **calls)
    ray = SimpleNamespace(tune=tune, init=lambda *_, **__: None, cluster_resources=dict)
    schedulers = SimpleNamespace(ASHAScheduler=SimpleNamespace)
    for name, module in {"ray": ray, "ray.tune": tune, "ray.tune.schedulers": schedulers}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return told


def test_failures_of_trials_are_those_of_their_runs(tmp_path, monkeypatch, tune):
    jobs = seeds(tmp_path, 4)
    run_config(jobs[3].config, out=jobs[3].out)
    ends = {jobs[0].out.name: "", jobs[2].out.name: "the loss is not finite", jobs[3].out.name: ""}
    monkeypatch.setattr(
        asha, "Process", lambda start: SimpleNamespace(result=lambda: ends[start.log.stem])
    )
    how = {"notify": lambda running: None, "stop": lambda: False}
    failed = asha.search(jobs, "local", "forgetting", **how)
    assert failed == {jobs[1]: "Ray: the worker died", jobs[2]: "the loss is not finite"}
    assert [job.file("error").exists() for job in jobs] == [False, True, True, False]
    assert [job.file("stopped").exists() for job in jobs] == [True, False, False, False]
    # Of a run that failed, or has only its base phase, no forgetting is known; none at all would be the best.
    assert [each["value"] for each in tune] == [100.0, 100.0, 100.0]
