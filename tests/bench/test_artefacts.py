"""Tables and figures of the paper, written from runs."""

from dataclasses import replace

import pytest
from tests.helpers import tiny
from tests.helpers.directories import cut

from geodl.bench.experiment import run_config
from geodl.bench.paper import outputs
from geodl.bench.paper.grid import Planned, Training
from geodl.bench.report.tables import AVERAGE, INCREMENTAL


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Make a run of 100 small classes that calls itself CIFAR-100."""
    root = tmp_path_factory.mktemp("grid")
    jobs = []
    for method, distill in (("icarl", "lwf"), ("lucir", "geodesic"), ("finetune", "none")):
        options = {"data": "cifar100", "base": 50, "phases": 5, "exemplars": 2, "epochs": 1}
        options |= {"ame": True, "analysis": False, "batch_size": 64}
        training = Training(method, distill, 50, 5)
        for seed in (1, 2):
            config = tiny.config(**options, method=method, distill=distill, seed=seed)
            job = Planned(config, root / f"{method}-{seed}", "", training, ("table1",))
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
    assert lwf["difference"] == pytest.approx(lwf[INCREMENTAL].mean - 49.59)
    assert icarl[INCREMENTAL] == setting.value("nme", "average_incremental")
    geodesic = [row for row in rows if row["method"] == "LUCIR + GeoDL"]
    classifiers = ["CNN", "k-NME", "AME (oracle)"]
    assert [row["classifier"] for row in geodesic] == classifiers * 2  # accuracy and forgetting
    assert geodesic[0]["compared with"] == AVERAGE
    bic = next(row for row in rows if row["method"] == "BiC")
    assert bic["published"] == 59.36
    assert bic[AVERAGE] is None
    notes = " ".join(table.notes)
    assert "epochs 6 instead of 160" in notes
    missing = sum(row["difference"] is None for row in rows)
    assert f"Not run yet: {missing} of {len(rows)} rows" in notes


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
