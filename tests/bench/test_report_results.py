"""Runs as read by a report, and their grouping into settings."""

import re
import shlex
import shutil
import statistics
from dataclasses import replace

import numpy as np
import pytest
from tests.helpers import tiny
from tests.helpers.directories import rewrite
from tests.helpers.reports import NAMES

from geodl.bench.report import page
from geodl.bench.report.results import Estimate, estimate, read_run, read_settings
from geodl.cli import app
from geodl.cli.options import effective
from geodl.core.errors import StoreError
from geodl.learning.learner import Learner
from geodl.store import Directory


def test_a_run_is_read_as_it_was_stored(runs):
    found = read_run(runs / "geo-1")
    assert found.complete
    assert [len(group) for group in found.groups] == [3, 1, 1, 1]
    assert found.seen == [3, 4, 5, 6]
    assert sorted(found.classes) == sorted(NAMES)
    assert list(found.results) == ["cnn", "nme", "ame", "ncm"]
    for classifier, result in found.results.items():
        counts = found.confusion(classifier).counts.numpy()
        assert counts.sum(axis=1).tolist() == [4] * 6
        assert 100 * np.trace(counts) / counts.sum() == pytest.approx(result["accuracy"][-1])
    assert [(e.phase, e.epoch) for e in found.epochs] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert [bool(e.angles) for e in found.epochs] == [False, True, True, True]
    assert len(found.similarities("svcca")) == 4
    assert found.memory().per_class() == dict.fromkeys(range(6), 3)


def test_an_epoch_that_was_repeated_after_a_kill_counts_once(runs, tmp_path):
    shutil.copytree(runs / "geo-1", tmp_path / "again")
    store = Directory(tmp_path / "again")
    epochs = [event for event in store.read_events() if event["kind"] == "epoch"]
    event = next(event for event in epochs if event["phase"] == 3)
    fields = {key: value for key, value in event.items() if key not in ("kind", "time")}
    with store.lock():
        store.events("epoch", **fields | {"loss": 77.0})
        store.events("epoch", **fields | {"epoch": 2, "loss": float("nan")})
    epochs = read_run(tmp_path / "again").epochs
    assert len(epochs) == 4
    assert epochs[-1].loss == 77.0


def test_runs_that_differ_in_their_seed_alone_are_one_setting(runs):
    settings = read_settings([runs / name for name in ("cos", "geo-2", "geo-1")])
    assert [(s.label, len(s.runs)) for s in settings] == [("LUCIR", 1), ("LUCIR + GeoDL", 2)]
    assert [r.config["seed"] for r in settings[1].runs] == [1, 2]
    values = [read_run(runs / name).results["nme"]["average"] for name in ("geo-1", "geo-2")]
    found = settings[1].value("nme", "average")
    assert found == Estimate(statistics.fmean(values), statistics.stdev(values), 2)
    assert settings[0].value("nme", "average").spread is None


def test_a_directory_and_a_seed_count_once(runs, tmp_path):
    again = shutil.copytree(runs / "geo-1", tmp_path / "again")
    paths = [runs / "geo-1", runs / "geo-2"]
    (setting,) = read_settings([*paths, runs / "geo-1", again])
    assert [run.path for run in setting.runs] == paths


def test_models_with_equal_options_are_not_averaged(tmp_path):
    for name, classes in (("flowers", 2), ("birds", 3)):
        learner = Learner(tiny.config(method="analytic", exemplars=0, expansion=16))
        learner.learn(tiny.dataset(classes=classes).train)
        learner.save(tmp_path / name)
    settings = read_settings([tmp_path / "flowers", tmp_path / "birds"])
    labels = [s.label.split(", ")[-1] for s in settings]
    assert (labels, [len(s.runs) for s in settings]) == (["flowers", "birds"], [1, 1])
    page.render(settings)


def test_labels_contain_the_differences(runs):
    paths = [runs / name for name in ("geo-1", "partial", "none", "base")]
    assert [setting.label for setting in read_settings(paths)] == [
        "LUCIR + GeoDL, base 3, phases 3",
        "LUCIR + GeoDL, base 3, phases 3, 3 of 4 phases",
        "CE, base 3, phases 3, analysis False, exemplars 0",
        "CE, base None, phases 0, analysis True, exemplars 3",
    ]


def test_a_similarity_that_could_not_be_computed_is_left_out(runs, tmp_path):
    shutil.copytree(runs / "geo-1", tmp_path / "run")
    metrics = Directory(tmp_path / "run").phase(2).json("metrics.json")
    del metrics["similarity"]["svcca"]  # features that do not vary have no correlation
    rewrite(tmp_path / "run", 2, "metrics.json", metrics)
    setting = read_settings([tmp_path / "run"])[0]
    assert [value is None for value in setting.similarity("svcca")] == [False, False, True, False]
    assert "<svg" in page.render([setting])


def test_the_loss_on_the_base_classes_ends_at_the_forgetting(runs):
    setting = read_settings([runs / "geo-1", runs / "geo-2"])[0]
    for classifier in setting.classifiers:
        lost = setting.lost(classifier)
        assert lost[0].mean == 0
        assert lost[-1].mean == pytest.approx(setting.value(classifier, "forgetting").mean)
        final = setting.value(classifier, "final").mean
        assert setting.accuracy(classifier)[-1].mean == pytest.approx(final)


def test_angles_along_training_are_of_all_runs(runs):
    setting = read_settings([runs / "geo-1", runs / "geo-2"])[0]
    assert [epoch.phase for epoch in setting.turned] == [1, 2, 3]
    both = [run.epochs[2].angles for run in setting.runs]
    together = sorted([*both[0], *both[1]])
    assert setting.drift()[1] == (together[0], statistics.median(together), together[-1])
    assert read_settings([runs / "none"])[0].drift() == []


def test_estimates_need_every_run():
    assert estimate([1.0, None]) is None
    assert estimate([]) is None
    assert estimate([1.0, float("nan")]) is None
    assert estimate([1.0, 2.0, 4.0]) == Estimate(7 / 3, pytest.approx(1.5275252316519468), 3)


@pytest.mark.parametrize("name", ["geo-2", "none", "base", "own", "cifar"])
def test_the_command_computes_the_same_run(runs, name):
    found = read_run(runs / name)
    words = shlex.split(found.command())
    assert words[0] == "geodl"
    _, bound, _ = app.parse_args(words[1:], exit_on_error=False, print_error=False)
    config = effective(bound.arguments["flags"]).config
    stored = {key: value for key, value in found.config.items() if key != "fingerprint"}
    assert config.identity() == stored
    assert config.threads == 1


def test_the_command_imports_what_the_run_imported(runs):
    found = replace(read_run(runs / "own"), environment={"imports": ["my part.py", "parts"]})
    assert found.command().endswith("--import 'my part.py' --import parts")


def test_no_run_is_a_plain_error(tmp_path):
    with pytest.raises(StoreError, match="at least one is needed"):
        read_settings([])
    with pytest.raises(StoreError, match=re.escape(str(tmp_path))):
        read_settings([tmp_path])
