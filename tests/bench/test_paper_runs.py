"""The runs of the paper: which they are, and which are one."""

import itertools

import pytest
import torch
from tests.helpers import tiny
from tests.helpers.directories import saved
from tests.helpers.paper import jobs_of

from geodl.bench.experiment import run_config
from geodl.bench.paper import grid
from geodl.bench.paper.grid import ARTEFACTS, Training, choose
from geodl.bench.report.published import SAME, numbers
from geodl.config import Layer, preset_layer
from geodl.core.errors import ConfigError
from geodl.methods import configure

ALL = ("cifar100", "imagenet-subset", "imagenet")


@pytest.mark.parametrize(
    ("what", "dataset", "phases", "count"),
    [
        # Seven rows are six trainings: LwF and iCaRL are one.
        ("table1", "cifar100", None, 6 * 3),
        ("table1", "imagenet", [5], 6),
        ("table2", None, None, 4 * 5),
        ("table3", None, None, 4),
        ("table4", None, None, 4 * 5),
        ("init10", None, None, 2 * 2),
        ("fig-phases", "imagenet-subset", None, 7 * 2),  # with joint training
        ("fig-classifiers", None, None, 4 * 3),
        ("fig-cca", None, None, 4),
    ],
)
def test_number_of_runs(what, dataset, phases, count):
    assert len(jobs_of(what, dataset, phases=phases)) == count
    assert len(jobs_of(what, dataset, phases=phases, runs=3)) == 3 * count


def test_all_runs_each_training_once():
    jobs = jobs_of("all", "cifar100")
    assert len({job.config.hash() for job in jobs}) == len(jobs)
    each = [jobs_of(what, "cifar100") for what in ARTEFACTS if what != "table4"]
    separate = [job.config.hash() for job in itertools.chain(*each)]
    assert {job.config.hash() for job in jobs} == set(separate)
    assert len(separate) > len(jobs)
    busiest = max(jobs, key=lambda job: len(job.artefacts))
    assert busiest.training == Training("finetune", "geodesic", 50, 10)
    artefacts = "table1 table2 table3 init10 fig-phases fig-classifiers fig-cca"
    assert busiest.artefacts == tuple(artefacts.split())


@pytest.mark.parametrize("dataset", ALL)
def test_every_published_accuracy_has_its_run(dataset):
    wanted = [n for n in numbers() if n.dataset == dataset]
    trained = {job.training for job in jobs_of("all", dataset)}
    assert wanted
    assert {grid.training_of(number) for number in wanted} <= trained


def test_runs_vary_what_their_table_varies():
    assert {job.config.phases for job in jobs_of("table1")} == {5, 10, 25}
    exemplars = {job.config.exemplars for job in jobs_of("table2", length="cpu")}
    assert exemplars == {20, 40, 60, 80, 100}
    assert {job.config["subspace_dim"] for job in jobs_of("table3")} == {16, 32, 64, 127}
    assert {job.config.base for job in jobs_of("init10")} == {10, 50}


def test_seeds_come_one_after_the_other():
    seeds = [job.config.seed for job in jobs_of("table3", runs=3)]
    assert seeds == [1] * 4 + [2] * 4 + [3] * 4


@pytest.mark.parametrize("dataset", ALL)
def test_smoke_grids_fit_the_digits(dataset):
    for job in jobs_of("all", dataset, "smoke"):
        base, phases = job.config.base, job.config.phases
        assert job.config.data == "digits"
        assert (10 - base) % phases == 0
        assert base >= 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("table9", None, None), "'table9': allowed values are table1, table2"),
        (("table2", "imagenet", None), "dataset = 'imagenet': the paper has table2 for cifar100"),
        (("table2", None, [5]), "phases = 5: the paper has table2 for 10"),
        (("all", None, [7]), "phases = 7: the paper has all for 5, 10, 25"),
    ],
)
def test_what_the_paper_does_not_have(arguments, message):
    with pytest.raises(ConfigError, match=message):
        choose(*arguments)


def test_all_leaves_out_what_has_not_the_phases():
    _, chosen = choose("all", "cifar100", [5])
    assert chosen == {"table1": (5,), "fig-phases": (5,), "fig-classifiers": (5,)}


def test_short_schedule_is_of_cifar_alone():
    with pytest.raises(ConfigError, match=r"length = 'cpu': .*for cifar100 alone"):
        jobs_of("table4", length="cpu")
    with pytest.raises(ConfigError, match="runs = 0"):
        jobs_of("table3", runs=0)


@pytest.mark.parametrize("pair", SAME.items())
def test_trainings_with_two_names_are_one(tmp_path, pair):
    data, found = tiny.dataset(), []
    for method, distill in pair:
        config = tiny.config(method=method, distill=distill, analysis=False)
        found.append(saved(run_config(config, out=tmp_path / method, data=data), 2))
    assert found[0].metrics["confusions"] == found[1].metrics["confusions"]
    assert all(torch.equal(tensor, found[1].model[name]) for name, tensor in found[0].model.items())


@pytest.mark.parametrize("dataset", ALL)
def test_presets_keep_such_trainings_one(dataset):
    # A table of options for one of the two methods in a preset would part them.
    for pair in SAME.items():
        found = []
        for method, distill in pair:
            options = Layer("", {"method": method, "distill": distill})
            config = configure([preset_layer(dataset), options]).config.identity()
            found.append({k: v for k, v in config.items() if k not in ("method", "sigmoid")})
        assert found[0] == found[1]
