"""Reproducing the paper: which runs, how long, asking first, and what is written."""

import csv
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.helpers import tiny
from tests.helpers.command import geodl
from tests.helpers.directories import cut, saved

from geodl.bench.experiment import run_config
from geodl.bench.paper import estimate, grid, outputs
from geodl.bench.paper.grid import ARTEFACTS, Planned, Training, choose, config_of
from geodl.bench.report.published import SAME, numbers
from geodl.bench.report.tables import AVERAGE, INCREMENTAL
from geodl.cli import grids
from geodl.cli import reproduce as command
from geodl.config import Layer, preset_layer
from geodl.core.cache import Cache
from geodl.core.errors import ConfigError
from geodl.core.text import duration
from geodl.learning.timing import Shape, Speed
from geodl.methods import configure

ALL = ("cifar100", "imagenet-subset", "imagenet")


def jobs_of(what, dataset=None, length="paper", phases=None, **options):
    dataset, chosen = choose(what, dataset, phases)
    return grid.grid(chosen, dataset, length, Path("runs"), **{"runs": 1} | options)


# -- which runs


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
    separate = {
        job.config.hash()
        for what in ARTEFACTS
        if what != "table4"
        for job in jobs_of(what, "cifar100")
    }
    assert {job.config.hash() for job in jobs} == separate
    assert sum(len(jobs_of(what, "cifar100")) for what in ARTEFACTS if what != "table4") > len(jobs)
    busiest = max(jobs, key=lambda job: len(job.artefacts))
    assert busiest.training == Training("finetune", "geodesic", 50, 10)
    assert busiest.artefacts == (
        "table1",
        "table2",
        "table3",
        "init10",
        "fig-phases",
        "fig-classifiers",
        "fig-cca",
    )


@pytest.mark.parametrize("dataset", ALL)
def test_every_published_accuracy_has_its_run(dataset):
    wanted = [n for n in numbers() if n.dataset == dataset]
    trained = {job.training for job in jobs_of("all", dataset)}
    assert wanted
    assert {grid.training_of(number) for number in wanted} <= trained


def test_paper_budget_is_the_presets_training():
    config = next(j for j in jobs_of("table1", "imagenet") if j.training.method == "lucir").config
    assert (config.network, config.epochs, config.base, config.exemplars) == (
        "resnet18",
        90,
        500,
        20,
    )
    bic = next(j for j in jobs_of("table1") if j.training.method == "bic").config
    assert (bic.epochs, bic.weight_decay, bic.phases) == (250, 2e-4, 5)
    assert {job.config.phases for job in jobs_of("table1")} == {5, 10, 25}
    assert {job.config.exemplars for job in jobs_of("table2", length="cpu")} == {
        20,
        40,
        60,
        80,
        100,
    }
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
        (("table4", "cifar100", None), "the paper has table4 for imagenet-subset"),
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
    with pytest.raises(
        ConfigError, match="length = 'cpu': there is a short schedule for cifar100 alone"
    ):
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
        configs = [
            configure(
                [preset_layer(dataset), Layer("", {"method": m, "distill": d})]
            ).config.identity()
            for m, d in pair
        ]
        common = [{k: v for k, v in c.items() if k not in ("method", "sigmoid")} for c in configs]
        assert common[0] == common[1]


# -- how long


def test_work_counts_images():
    config = config_of(Training("lucir", "cosine", 50, 5), "cifar100", "cpu")
    first, second, *_, last = estimate.work(config)
    assert first.trained == 16 * 50 * 500
    assert second.trained == 6 * (10 * 500 + 50 * 20)
    assert last.trained == 6 * (10 * 500 + 90 * 20)
    # herding and means; test; exemplars, mirrored too; AME's 150 a class
    assert first.evaluated == 25000 + 50 * 100 + 2 * 50 * 20 + 50 * 150
    joint = config_of(Training("joint", "none", 50, 5), "cifar100", "cpu")
    assert [each.trained for each in estimate.work(joint)][1:] == [
        16 * 500 * seen for seen in (60, 70, 80, 90, 100)
    ]


SPEED = Speed({"none": 100.0, "lwf": 50.0, "cosine": 40.0, "geodesic": 20.0}, 1e9)


def test_seconds_of_each_kind_of_phase():
    def of(method, distill):
        training = Training(method, distill, 50, 5)
        config = config_of(training, "cifar100", "cpu")
        return estimate.seconds(config, estimate.work(config), SPEED)

    assert of("finetune", "geodesic")[:2] == pytest.approx([400_000 / 100, 36_000 / 20], rel=1e-3)
    assert of("finetune", "lwf")[1] == pytest.approx(36_000 / 50, rel=1e-3)
    assert of("mnemonics", "cosine")[1] == pytest.approx(1.5 * 36_000 / 40, rel=1e-3)
    assert of("joint", "none")[1] == pytest.approx(480_000 / 100, rel=1e-3)


def test_plan_counts_shared_base_phases_once_and_complete_phases_not_at_all():
    jobs = jobs_of("table1", "cifar100", "cpu", phases=[5])
    works = estimate.plan(jobs, [0] * len(jobs))
    trained = [job.config.method for job, each in zip(jobs, works, strict=True) if each[0].trained]
    # linear head; BiC, which holds images out; cosine head
    assert trained == ["icarl", "bic", "lucir"]
    done = [6, 0, 2, 0, 0, 0]
    later = estimate.plan(jobs, done)
    none = estimate.Work(0, 0)
    assert later[0] == [none] * 6
    assert later[2] == [none, none, *works[2][2:]]
    assert all((each[0].trained, each[0].evaluated > 0) == (0, True) for each in later[3:])


def test_base_phases_of_other_seeds_are_others():
    jobs = jobs_of("table3", "cifar100", "cpu", runs=2)
    assert [each[0].trained > 0 for each in estimate.plan(jobs, [0] * 8)] == [
        True,
        False,
        False,
        False,
    ] * 2


def test_what_is_timed():
    config = config_of(Training("finetune", "none", 50, 5), "cifar100", "smoke")
    for precision in ("32", "bf16"):
        found = estimate.shape_of(config.model_copy(update={"precision": precision}))
        assert found == Shape("resnet8", 8, 64, precision=precision)
    large = config_of(Training("finetune", "none", 50, 5), "imagenet-subset", "paper")
    assert (estimate.shape_of(large).size, estimate.shape_of(large).batch) == (224, 16)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(40, "40 s"), (720, "12 min"), (12600, "3.5 h"), (181440, "2.1 days"), (0, "0 s")],
)
def test_words_for_times(seconds, words):
    assert duration(seconds) == words


# -- asking first


@pytest.mark.parametrize(
    ("answer", "refused"),
    [("y", None), (" YES ", None), ("", "nothing was started"), ("n", "nothing was started"),
     (None, r"about 2\.0 h, and there is no terminal to confirm it: add --yes")],
)  # fmt: skip
def test_much_work_is_asked_about(monkeypatch, answer, refused):
    monkeypatch.setattr(grids.sys.stdin, "isatty", lambda: answer is not None, raising=False)
    monkeypatch.setattr(grids.console, "input", lambda prompt, **_: answer)
    grids.confirm("about 2.0 h", yes=True)
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        grids.confirm("about 2.0 h", yes=False)


class Here:
    """Does runs in this process: starting another takes seconds each time."""

    places = 1

    def __init__(self, config, places=None):
        self.config = config

    def start(self, job):
        run_config(job.config, out=job.out, cache=Cache())
        return self

    def result(self):
        return ""


@pytest.fixture
def quick(monkeypatch):
    """Make the smoke length tiny, and speeds known."""
    monkeypatch.setattr(command, "measure", lambda shape: SPEED)
    tiny = {"network": "convnet", "epochs": 1, "base_epochs": 1, "phases": 2}

    def smaller(training, dataset, length, options):
        config = config_of(training, dataset, length, options)
        return config.model_copy(update=tiny if length == "smoke" else {})

    monkeypatch.setattr(grid, "config_of", smaller)
    monkeypatch.setattr(grids, "Local", Here)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_dry_run_needs_no_data(quick, tmp_path):
    options = ("--length", "paper", "--data-dir", str(tmp_path / "nothing"), "--dry-run")
    shown = geodl(
        "reproduce", "table1", "--phases", "5", "25", "--runs", "2", *options, cwd=tmp_path
    ).stdout
    lines = shown.splitlines()
    assert len([line for line in lines if "table1)" in line]) == 2 * 6 * 2
    assert "LUCIR + GeoDL, 50 classes + 25 phases, 20 exemplars, seed 2" in shown
    assert "24 runs, 24 of them not complete, 225,900,000 images to train on: about" in shown
    assert "An estimate from" in shown
    assert not (tmp_path / "reproduced").exists()


@pytest.mark.parametrize(("seconds", "asked"), [(3600, False), (3601, True)])
def test_more_than_an_hour_does_not_start_by_itself(quick, tmp_path, monkeypatch, seconds, asked):
    started = []
    monkeypatch.setattr(command, "carry_out", lambda *_, **__: started.append(1) or False)
    monkeypatch.setattr(command, "load_data", lambda config: tiny.dataset())
    times = iter([seconds])
    monkeypatch.setattr(estimate, "seconds", lambda *_: [float(next(times, 0))])
    monkeypatch.setattr(grids.sys.stdin, "isatty", lambda: False, raising=False)
    said = geodl(
        "reproduce", "table3", "--data-dir", str(tmp_path), cwd=tmp_path, status=2 if asked else 0
    )
    assert ("there is no terminal to confirm it: add --yes" in said.stderr) == asked
    assert bool(started) != asked


def test_missing_data_are_told_before_anything_is_asked(quick, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "confirm", lambda *_: pytest.fail("asked"))
    failed = geodl(
        "reproduce", "table3", "--data-dir", str(tmp_path / "nothing"), cwd=tmp_path, status=2
    )
    assert "nothing" in failed.stderr


def test_a_run_that_fails_does_not_stop_the_others(quick, tmp_path, monkeypatch):
    tried = []

    class Fails(Here):
        def start(self, job):
            tried.append(job.label)
            return self

        def result(self):
            return "the loss is not finite"

    monkeypatch.setattr(grids, "Local", Fails)
    order = ("reproduce", "table3", "--length", "smoke", "--runs", "1", "--out", "out")
    said = geodl(*order, cwd=tmp_path, status=2)
    assert len(tried) == 4
    assert "4 of 4 runs failed; the first: CE + GeoDL" in said.stderr
    assert "the loss is not finite" in said.stderr
    assert "Not run yet: 4 of 4 rows" in (tmp_path / "out" / "table3.md").read_text()


def test_a_job_array_instead(quick, tmp_path):
    said = geodl(
        "reproduce", "table3", "--runs", "1", "--submit", "slurm", "--out", "out", cwd=tmp_path
    ).stdout
    assert "4 runs, 4 of them not complete, 29,280,000 images to train on: about" in said
    assert "submit them: sbatch " in said
    assert (
        "#SBATCH --array=1-4\n"
        in (tmp_path / "out" / "runs" / ".sweep" / "array.sbatch").read_text()
    )


# -- what is written


def test_a_table_from_end_to_end(quick, tmp_path, monkeypatch):
    monkeypatch.setenv("GEODL_CACHE", str(tmp_path / "cache"))
    order = ("reproduce", "init10", "--length", "smoke", "--runs", "2", "--out", "out")
    said = geodl(*order, cwd=tmp_path).stdout
    assert said.count(": complete: ") == 8
    events = (tmp_path / "out" / "runs").glob("*/events.jsonl")
    assert (
        sum('"kind": "cached"' in path.read_text() for path in events) == 4
    )  # two losses share each base of each seed
    text = (tmp_path / "out" / "init10.md").read_text()
    assert text.startswith("# 10-class start (CIFAR-100)\n")
    assert "cannot be compared" in text
    assert "±" in text
    rows = list(csv.DictReader((tmp_path / "out" / "init10.csv").read_text().splitlines()))
    assert [(row["method"], row["base classes"], row["published"]) for row in rows] == [
        ("CE + GeoDL", "50", "62.8"),
        ("CE + GeoDL", "10", "60.5"),
        ("CE + Cos", "50", "60.5"),
        ("CE + Cos", "10", "57.3"),
    ]
    assert all(row[f"{AVERAGE} runs"] == "2" and float(row[AVERAGE]) > 0 for row in rows)
    assert "difference" not in rows[0]
    assert (tmp_path / "out" / "init10.tex").read_text().startswith("\\begin{tabular}")
    monkeypatch.setattr(Here, "start", lambda *_: pytest.fail("ran again"))
    (tmp_path / "out" / "init10.md").unlink()
    assert "8 runs, all complete" in geodl(*order, cwd=tmp_path).stdout
    assert (tmp_path / "out" / "init10.md").read_text() == text
    cut(next((tmp_path / "out" / "runs").glob("digits-*")), 2)
    assert "8 runs, 1 of them not complete" in geodl(*order, "--dry-run", cwd=tmp_path).stdout


def test_figures_from_end_to_end(quick, tmp_path, monkeypatch):
    monkeypatch.setenv("GEODL_CACHE", str(tmp_path / "cache"))
    geodl("reproduce", "fig-cca", "--length", "smoke", "--runs", "1", "--out", "out", cwd=tmp_path)
    names = {path.name for path in (tmp_path / "out").iterdir() if path.is_file()}
    stems = {"fig-cca-T10-similarity-svcca", "fig-cca-T10-similarity-cka", "fig-cca-T10-angles"}
    figures = {f"{stem}.{kind}" for stem in stems for kind in ("svg", "pdf")}
    assert names == figures | {"fig-cca.md", "fig-cca.csv", "fig-cca.tex"}
    svg = (tmp_path / "out" / "fig-cca-T10-similarity-svcca.svg").read_text()
    assert svg.count('id="line-') == 4


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Make a run of 100 small classes that calls itself CIFAR-100."""
    root = tmp_path_factory.mktemp("grid")
    jobs = []
    for method, distill in (("icarl", "lwf"), ("lucir", "geodesic"), ("finetune", "none")):
        options = {
            "data": "cifar100",
            "base": 50,
            "phases": 5,
            "exemplars": 2,
            "epochs": 1,
            "ame": True,
        }
        for seed in (1, 2):
            config = tiny.config(
                **options, method=method, distill=distill, seed=seed, analysis=False, batch_size=64
            )
            job = Planned(
                config, root / f"{method}-{seed}", "", Training(method, distill, 50, 5), ("table1",)
            )
            run_config(config, out=job.out, data=tiny.dataset(100, train=3, test=2))
            jobs.append(job)
    return jobs


def test_ours_beside_published(made):
    settings = outputs.read(made)
    table = outputs.compared("table1", "cifar100", "cpu", [5], settings)
    head = {name: i for i, name in enumerate(table.header)}
    rows = [{name: row[i] for name, i in head.items()} for row in table.rows]
    lwf, icarl = (next(row for row in rows if row["method"] == name) for name in ("LwF", "iCaRL"))
    setting = settings[Training("icarl", "lwf", 50, 5)]
    assert lwf["published"] == 49.59
    assert lwf["compared with"] == INCREMENTAL
    assert lwf[INCREMENTAL] == setting.value("cnn", "average_incremental")
    assert lwf[AVERAGE] == setting.value("cnn", "average")
    assert lwf["difference"] == pytest.approx(
        setting.value("cnn", "average_incremental").mean - 49.59
    )
    assert icarl[INCREMENTAL] == setting.value("nme", "average_incremental")
    geodesic = [row for row in rows if row["method"] == "LUCIR + GeoDL"]
    assert [row["classifier"] for row in geodesic] == [
        "CNN",
        "k-NME",
        "AME (oracle)",
    ] * 2  # accuracy and forgetting
    assert geodesic[0]["compared with"] == AVERAGE
    bic = next(row for row in rows if row["method"] == "BiC")
    assert bic["published"] == 59.36
    assert bic[AVERAGE] is None
    notes = " ".join(table.notes)
    assert "epochs 6 instead of 160" in notes
    assert (
        f"Not run yet: {sum(row['difference'] is None for row in rows)} of {len(rows)} rows"
        in notes
    )


def test_figures_of_classifiers_and_phases(made, tmp_path):
    settings = outputs.read(made)
    written = outputs.write("fig-phases", "cifar100", "cpu", [5], settings, tmp_path)
    assert {path.name for path in written if path.suffix == ".svg"} == {
        f"fig-phases-T5-accuracy-{name}.svg" for name in ("cnn", "nme", "ame", "ncm")
    }
    assert "| LwF / iCaRL, T = 5 | CNN | 2 |" in (tmp_path / "fig-phases.md").read_text()
    written = outputs.write("fig-classifiers", "cifar100", "cpu", [5], settings, tmp_path)
    assert {path.name for path in written if path.suffix == ".pdf"} == {
        f"fig-classifiers-{name}.pdf" for name in ("cnn", "nme", "ame")
    }
    assert "CE, T = 5" in (tmp_path / "fig-classifiers.md").read_text()


def test_an_incomplete_run_counts_as_not_run(made, tmp_path):
    begun = replace(made[0], out=tmp_path)
    (tmp_path / "head.json").write_bytes((made[0].out / "head.json").read_bytes())
    cut(tmp_path, 0)
    assert outputs.read([begun]) == {}
