"""`geodl reproduce`: confirmation, failures, and tables and figures from end to end."""

import csv

import pytest
import torch
from tests.helpers import tiny
from tests.helpers.command import geodl
from tests.helpers.directories import cut
from tests.helpers.paper import SPEED

from geodl.bench.experiment import run_config
from geodl.bench.paper import estimate, grid
from geodl.bench.paper.grid import config_of
from geodl.bench.report.tables import AVERAGE
from geodl.cli import grids
from geodl.cli import reproduce as command
from geodl.core.cache import Cache


class Here:
    """Executes runs in this process, which saves the start of others."""

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
    small = {"network": "convnet", "epochs": 1, "base_epochs": 1, "phases": 2}

    def smaller(training, dataset, length, options):
        config = config_of(training, dataset, length, options)
        return config.model_copy(update=small if length == "smoke" else {})

    monkeypatch.setattr(grid, "config_of", smaller)
    monkeypatch.setattr(grids, "Local", Here)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_dry_run_needs_no_data(quick, tmp_path):
    order = f"table1 --phases 5 25 --runs 2 --length paper --data-dir {tmp_path}/nothing --dry-run"
    shown = geodl("reproduce", *order.split(), cwd=tmp_path).stdout
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
    order = ("reproduce", "table3", "--data-dir", str(tmp_path))
    said = geodl(*order, cwd=tmp_path, status=2 if asked else 0)
    assert ("there is no terminal to confirm it: add --yes" in said.stderr) == asked
    assert bool(started) != asked


def test_missing_data_are_an_error_before_confirmation(quick, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "confirm", lambda *_: pytest.fail("asked"))
    order = ("reproduce", "table3", "--data-dir", str(tmp_path / "nothing"))
    assert "nothing" in geodl(*order, cwd=tmp_path, status=2).stderr


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
    order = "reproduce table3 --runs 1 --submit slurm --out out"
    said = geodl(*order.split(), cwd=tmp_path).stdout
    assert "4 runs, 4 of them not complete, 29,280,000 images to train on: about" in said
    assert "submit them: sbatch " in said
    script = tmp_path / "out" / "runs" / ".sweep" / "array.sbatch"
    assert "#SBATCH --array=1-4\n" in script.read_text()


def test_a_table_from_end_to_end(quick, tmp_path, monkeypatch):
    order = ("reproduce", "init10", "--length", "smoke", "--runs", "2", "--out", "out")
    said = geodl(*order, cwd=tmp_path).stdout
    assert said.count(": complete: ") == 8
    events = (tmp_path / "out" / "runs").glob("*/events.jsonl")
    # two losses share each base of each seed
    assert sum('"kind": "cached"' in path.read_text() for path in events) == 4
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


def test_figures_from_end_to_end(quick, tmp_path):
    geodl("reproduce", "fig-cca", "--length", "smoke", "--runs", "1", "--out", "out", cwd=tmp_path)
    names = {path.name for path in (tmp_path / "out").iterdir() if path.is_file()}
    stems = {"fig-cca-T10-similarity-svcca", "fig-cca-T10-similarity-cka", "fig-cca-T10-angles"}
    figures = {f"{stem}.{kind}" for stem in stems for kind in ("svg", "pdf")}
    assert names == figures | {"fig-cca.md", "fig-cca.csv", "fig-cca.tex"}
    svg = (tmp_path / "out" / "fig-cca-T10-similarity-svcca.svg").read_text()
    assert svg.count('id="line-') == 4
