"""Results kept as small files, and the page that judges the paper's comparisons by them."""

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from studies import records, reproduction, verdicts
from studies.records import Record
from studies.reproduction import Claim
from studies.results import main
from studies.verdicts import Difference, verdict
from tests.helpers import tiny
from tests.helpers.directories import content, cut, sign

from geodl.bench import experiment
from geodl.bench.experiment import results_of, run_config
from geodl.bench.paper.grid import Training
from geodl.bench.report.published import FILES, REPETITION
from geodl.bench.report.tables import AVERAGE
from geodl.config import Layer, preset_layer
from geodl.core.errors import StoreError
from geodl.methods import configure
from geodl.store import Directory

START = datetime(2026, 1, 1, tzinfo=UTC)
ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


def event(second, kind, **fields):
    return {
        "time": (START + timedelta(seconds=second)).isoformat(timespec="milliseconds"),
        "kind": kind,
        **fields,
    }


# -- files


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "r"
    config = tiny.config(method="lwf", distill="lwf", seed=7, analysis=False, ame=True)
    run_config(config, out=path, data=tiny.dataset())
    return path


def test_a_record_tells_what_the_run_reached(finished, tmp_path):
    (written,) = records.add([finished], tmp_path)
    (found,) = records.read(tmp_path)
    assert written.name.startswith("lwf-lwf-")
    assert written.name.endswith("-seed7.json")
    assert found.seed == 7
    assert found.training == ("icarl", "lwf")
    assert (found.config["method"], found.config["epochs"]) == ("lwf", 2)
    assert found.machine["threads"] == 1
    assert set(found.results) == {"cnn", "nme", "ame", "ncm"}
    for name, trajectory in results_of(Directory(finished)).items():
        result = trajectory.to_dict()
        assert found.results[name]["accuracy"] == result["accuracy"]
        assert found.value(name, "final") == result["accuracy"][-1]
        assert all(
            found.value(name, key) == result[key]
            for key in ("average", "average_incremental", "forgetting")
        )
    assert found.seconds == records.phase_seconds(Directory(finished).read_events(), 3)
    assert not found.cached
    # nothing in it depends on where the data or the run were
    assert str(finished) not in written.read_text()
    assert not {*FILES, *REPETITION} & set(found.config)


def test_other_options_have_another_file(finished, tmp_path):
    other = tmp_path / "other"
    config = tiny.config(method="lwf", distill="lwf", seed=7, analysis=False, ame=True, lr=0.01)
    run_config(config, out=other, data=tiny.dataset())
    names = {path.name for path in records.add([finished, other], tmp_path / "kept")}
    assert len(names) == 2
    assert {path.name for path in records.add([finished, other], tmp_path / "kept")} == names


def test_a_record_tells_what_changed_on_the_way(finished, tmp_path):
    path = shutil.copytree(finished, tmp_path / "r")
    run = Directory(path)
    environment = {**run.environment, "threads": 2}
    Directory.create_or_open(
        path,
        run.config,
        environment=environment,
        must_match=["threads"],
        allow_environment_change=True,
    )
    found = records.record(path)
    assert found.machine["threads"] == 2
    assert found.machine["changed"] == ["threads is 1 there and 2 now"]
    before = records.record(finished)
    assert "changed" not in before.machine
    text = verdicts.page([found, before, found], "cifar100-cpu")
    assert re.search(
        r" 1 run on cpu \(\w+\), 1 thread, precision 32, torch [^ ;,]+; 2 runs on cpu \(\w+\), 2 threads, precision 32, torch [^ ;,]+, "
        r"earlier with threads 1; commits ",
        text,
    )


def test_only_complete_runs_have_a_result(finished, tmp_path):
    (tmp_path / "head.json").write_bytes((finished / "head.json").read_bytes())
    cut(tmp_path, 0)
    with pytest.raises(StoreError, match="0 of 3 phases are complete"):
        records.record(tmp_path)


def test_a_run_names_the_commit_of_its_code(finished, tmp_path, monkeypatch):
    def git(*words):
        return subprocess.run(
            ["git", "-C", str(tmp_path), *words], check=True, capture_output=True, text=True
        ).stdout

    def as_if_here() -> str | None:
        monkeypatch.setattr(experiment, "__file__", str(tmp_path / "experiment.py"))
        return experiment.commit()

    for key in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(key, "nobody")
    assert as_if_here() is None  # no repository
    git("init", "-q")
    (tmp_path / "experiment.py").write_text("1")
    git("commit", "-q", "--allow-empty", "-m", "another project's")
    assert as_if_here() is None  # installed inside another project's checkout
    git("add", "experiment.py")
    git("commit", "-q", "-m", "ours")
    assert as_if_here() == git("rev-parse", "--short", "HEAD").strip()
    (tmp_path / "experiment.py").write_text("2")
    assert as_if_here() == git("rev-parse", "--short", "HEAD").strip() + "+"
    assert records.record(finished).commit == Directory(finished).environment["commit"]


def test_what_is_not_a_record_is_refused(tmp_path):
    with pytest.raises(StoreError, match="no such directory"):
        records.read(tmp_path / "nothing")
    (tmp_path / "a.json").write_text('{"format": 1, "other": 2}')
    with pytest.raises(StoreError, match=r"a\.json: not a record"):
        records.read(tmp_path)


@pytest.mark.parametrize("key", ["config", "seed", "machine", "seconds", "results"])
def test_records_of_another_form_are_named(finished, tmp_path, key):
    (path,) = records.add([finished], tmp_path)
    assert records.read(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: "x"}))
    with pytest.raises(StoreError, match=rf"{path.name}: not a record"):
        records.read(tmp_path)


def test_results_that_cannot_be_kept_are_one_line(finished, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="file"):
        main(["add", str(finished), "--to", str(tmp_path / "file" / "x")])
    run = shutil.copytree(finished, tmp_path / "run")
    head = content(run / "head.json")
    head["record"]["config"]["method"] = "../outside"
    sign(run / "head.json", head)
    with pytest.raises(SystemExit, match="a name that no file can have"):
        main(["add", str(run), str(tmp_path / "file"), "--to", str(tmp_path / "kept")])
    assert list((tmp_path / "kept").iterdir()) == []


# -- time


def test_seconds_of_phases():
    events = [
        event(0, "run"),
        event(1, "phase", phase=0),
        event(2, "stage"),
        event(40, "epoch"),
        event(50, "evaluated", phase=0),
        event(51, "phase", phase=1),
        event(71, "evaluated", phase=1),
        event(72, "done"),
    ]
    assert records.phase_seconds(events, 2) == [49, 20]


def test_interruptions_do_not_count():
    events = [
        event(0, "run"),
        event(0, "phase", phase=0),
        event(10, "epoch"),
        event(10_000, "run"),
        event(10_005, "phase", phase=0),
        event(10_020, "epoch"),
        event(10_022, "evaluated", phase=0),
        event(20_000, "run"),  # asked for again when complete
        event(20_001, "done"),
    ]
    assert records.phase_seconds(events, 1) == [10 + 17]


@given(st.lists(st.sampled_from(["run", "phase", "epoch", "evaluated", "done"]), max_size=12))
def test_seconds_are_never_more_than_passed(kinds):
    events = [
        event(3 * i, kind, **({"phase": 0} if kind == "phase" else {}))
        for i, kind in enumerate(kinds)
    ]
    (found,) = records.phase_seconds(events, 1)
    assert 0 <= found <= 3 * max(len(kinds) - 1, 0)


# -- verdicts


def made(
    method,
    distill,
    seed,
    *,
    average,
    forgetting=10.0,
    final=50.0,
    preset="cifar100-cpu",
    cached=False,
    **options,
):
    layers = [preset_layer(preset), Layer("", {"method": method, "distill": distill, **options})]
    found = configure(layers).config
    config = {key: value for key, value in found.identity().items() if key not in REPETITION}
    result = {
        "average": average,
        "average_incremental": average,
        "forgetting": forgetting,
        "final": final,
    }
    machine = {"device": "cpu", "machine": "x86_64", "threads": 1, "torch": "2"}
    results = {name: {**result, "accuracy": [final]} for name in ("cnn", "nme", "ame", "ncm")}
    return Record(
        json.loads(json.dumps(config)),
        seed,
        "abc1234",
        machine,
        [600.0, 60.0, 60.0],
        cached,
        results,
    )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1.0, 1.1, 0.9], "better"),
        ([-1.0, -1.1, -0.9], "worse"),
        (
            [1.0, 0.1, 2.0],
            "not decided",
        ),  # the mean is above its deviation, but the interval reaches below zero
        ([5.0, 5.1], "not decided"),
        ([9.0], "not decided"),
        ([0.0, 0.0, 0.0], "not decided"),
    ],
)
def test_verdicts(values, words):
    assert verdict(Difference(values)) == words
    assert verdict(Difference([-value for value in values]), lower_is_better=True) == words


@pytest.mark.parametrize("degrees", range(1, 11))
def test_students_t_leaves_one_in_forty_on_each_side(degrees):
    x = np.tan(
        np.linspace(0, np.arctan(verdicts.T_95[degrees - 1]), 20_001)
    )  # fine near zero, where the density is
    constant = math.gamma((degrees + 1) / 2) / (
        math.sqrt(degrees * math.pi) * math.gamma(degrees / 2)
    )
    density = constant * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
    assert np.trapezoid(density, x) == pytest.approx(0.475, abs=2e-5)


def test_differences_are_taken_seed_by_seed():
    one = [
        made("finetune", "geodesic", seed, average=value)
        for seed, value in ((1, 60.0), (2, 64.0), (3, 62.0))
    ]
    other = [
        made("finetune", "cosine", seed, average=value)
        for seed, value in ((3, 61.0), (1, 58.0), (4, 0.0))
    ]
    found = verdicts.difference(one, other, ("nme", "nme"), "average")
    assert list(found.values) == [2.0, 1.0]
    low, high = found.interval
    assert (low + high) / 2 == pytest.approx(1.5)
    assert (high - low) / 2 == pytest.approx(12.706 * 0.5)
    assert verdicts.difference(one, [], ("nme", "nme"), "average") is None


def judged(table):
    """Give the cells of each comparison under each classifier: difference, in the paper, verdict."""
    found = {}
    for name, _, seeds, *cells in table.rows:
        found |= {(name, "CNN"): [seeds, *cells[:3]], (name, "k-NME"): [seeds, *cells[3:]]}
    return found


def test_comparisons_show_the_interval_and_the_papers_difference():
    found = [
        made("finetune", "geodesic", s, average=a) for s, a in ((1, 60.0), (2, 63.0), (3, 61.5))
    ]
    found += [
        made("finetune", "cosine", s, average=a) for s, a in ((1, 58.0), (2, 60.5), (3, 59.5))
    ]
    found += [made("finetune", "lwf", 1, average=57.5), made("finetune", "none", 1, average=40.0)]
    rows, others = verdicts.sort_out(found, "cifar100-cpu")
    assert not others
    table = judged(verdicts.comparisons(rows, verdicts.PAIRS, AVERAGE))
    seeds, shown, published, words = table["CE + GeoDL against CE + Cos", "k-NME"]
    assert (seeds, shown, words) == (3, "+2.17 (+1.45 to +2.88)", "better")
    assert published == pytest.approx(61.40 - 60.09)
    assert table["CE + GeoDL against CE + Cos", "CNN"][2] == pytest.approx(58.54 - 59.82)
    assert table["CE + Cos against CE + LwF", "CNN"][1:] == [
        "+0.50",
        pytest.approx(6.98),
        "not decided",
    ]
    assert ("LUCIR + GeoDL against LUCIR", "k-NME") not in table


def test_less_forgetting_is_better():
    found = [made("lucir", "geodesic", s, average=1.0, forgetting=8.0 + s / 10) for s in (1, 2, 3)]
    found += [made("lucir", "cosine", s, average=1.0) for s in (1, 2, 3)]
    rows, _ = verdicts.sort_out(found, "cifar100-cpu")
    table = judged(verdicts.comparisons(rows, verdicts.PAIRS, "forgetting"))
    _, shown, published, words = table["LUCIR + GeoDL against LUCIR", "CNN"]
    assert (shown, words) == ("-1.80 (-2.05 to -1.55)", "better")
    assert published == pytest.approx(9.49 - 18.70)


def test_the_two_readings_stand_side_by_side_for_every_t():
    found = []
    for t, s in ((5, 1), (10, 1)):
        one = made("lucir", "geodesic", s, average=60.0, phases=t)
        other = made("lucir", "cosine", s, average=59.0, phases=t)
        results = {
            name: {**each, "average": 60.0 + 3 * (name == "ame")}
            for name, each in one.results.items()
        }
        found += [replace(one, results=results), other]
    rows, others = verdicts.sort_out(found, "cifar100-cpu")
    assert not others
    table = {(row[0], row[1]): row[2:] for row in verdicts.readings(rows).rows}
    assert len(table) == 12
    assert table[10, "CNN"][0] == "+1.00"
    assert table[5, "AME (oracle) against CNN"][:2] == ["+4.00", pytest.approx(65.14 - 63.17)]
    assert table[10, "AME (oracle) against CNN"][1] == pytest.approx(65.03 - 60.14)
    assert table[5, "AME (oracle) against CNN, LUCIR on both sides"] == [
        "+0.00",
        None,
        "+0.00",
        None,
    ]


def test_cosine_on_the_grid_is_a_row_of_its_own():
    found = [
        made("lucir", "cosine", 1, average=50.0),
        made("lucir", "cosine", 1, average=51.0, cosine_features="grid"),
    ]
    rows, others = verdicts.sort_out(found, "cifar100-cpu")
    assert not others
    assert [
        rows[name, 5][0].value("cnn", "average") for name in ("LUCIR", "LUCIR, cosine on the grid")
    ] == [50.0, 51.0]


def test_the_page_of_the_closed_form():
    found = []
    for t in (5, 25):
        for seed in (1, 2):
            one = made(
                "analytic", "none", seed, average=60.0 + seed, preset="cifar100-analytic", phases=t
            )
            found.append(
                replace(
                    one,
                    results={"analytic": one.results["cnn"], "analytic_single": one.results["cnn"]},
                )
            )
    for options in ({"epochs": 120}, {"distill": "geodesic"}):  # other trainings, no further seeds
        found.append(replace(found[0], seed=3, config=found[0].config | options))
    text = verdicts.page(found, "cifar100-analytic")
    assert (
        "| geodl: closed form, with the mirrored view | average 0..T | 61.50 ± 0.71 | 61.50 ± 0.71 |"
        in text
    )
    assert "| LUCIR + GeoDL (the paper's Table 1) | average 1..T | 65.14 | 63.12 |" in text
    assert "30 epochs in phase 0." in text
    assert "| 25 | 2 | 62.00 |" in text


def test_one_training_fills_both_its_rows_and_departures_stand_apart():
    found = [
        made("lwf", "lwf", 1, average=50.0),
        made("finetune", "geodesic", 1, average=60.0),
        made("finetune", "geodesic", 1, average=61.0, geodesic_weight=14.0),
        made("joint", "none", 1, average=None, phases=0),
        made("bic", "geodesic", 1, average=60.0),
        made("icarl", "lwf", 1, average=51.0),
    ]
    rows, others = verdicts.sort_out(found, "cifar100-cpu")
    filled = {name for (name, t), records in rows.items() if records and t == 5}
    assert filled == {"LwF", "iCaRL", "iCaRL + GeoDL", "CE + GeoDL", "Joint training"}
    assert [record.value("cnn", "average") for record in rows["CE + GeoDL", 5]] == [60.0]
    assert [departs for _, departs in others] == [
        ["geodesic_weight 14.0 instead of 6.0"],
        [],
        ["the same once more"],
    ]
    assert len(rows["iCaRL", 5]) == 1


def test_a_joint_run_of_all_classes_serves_each_t_that_has_none_of_its_seed():
    found = [
        made("joint", "none", 1, average=None, final=60.0, phases=0),
        made("joint", "none", 1, average=None, final=61.0, phases=5),
        made("joint", "none", 2, average=None, final=62.0, phases=0),
        made("lucir", "cosine", 1, average=50.0, phases=10),
    ]
    rows, others = verdicts.sort_out(found, "cifar100-cpu")
    assert not others
    assert [record.value("cnn", "final") for record in rows["Joint training", 5]] == [61.0, 62.0]
    assert [record.value("cnn", "final") for record in rows["Joint training", 10]] == [60.0, 62.0]


def test_no_joint_run_of_all_classes_is_lost():
    alone = [made("joint", "none", 1, average=None, final=60.0, phases=0)]
    assert verdicts.sort_out(alone, "cifar100-cpu") == ({("Joint training", 0): alone}, [])
    assert "| Joint training | 0 | 1 |  |  | 60.00 |" in verdicts.page(alone, "cifar100-cpu")
    again = [*alone, made("joint", "none", 1, average=None, final=61.0, phases=5)]
    rows, others = verdicts.sort_out(again, "cifar100-cpu")
    assert rows == {("Joint training", 5): again[1:]}
    assert others == [(alone[0], ["the same once more"])]


def test_what_a_preset_leaves_to_the_device_is_no_departure():
    found = [
        made("lucir", "cosine", seed, average=50.0, precision=bits)
        for seed, bits in ((1, "32"), (2, "bf16"))
    ]
    rows, others = verdicts.sort_out(found, "cifar100-cpu")
    assert len(rows["LUCIR", 5]) == 2
    assert not others
    text = verdicts.page(
        [found[0], replace(found[1], machine=found[1].machine | {"precision": "bf16"})],
        "cifar100-cpu",
    )
    shared = "1 run on cpu (x86_64), 1 thread, precision"
    assert f"{shared} 32, torch 2; {shared} bf16, torch 2; commits" in text


def test_a_record_older_than_an_option_is_no_departure():
    old = made("lucir", "cosine", 1, average=50.0)
    config = {key: value for key, value in old.config.items() if key != "cosine_features"}
    rows, others = verdicts.sort_out([replace(old, config=config | {"gone": None})], "cifar100-cpu")
    assert len(rows["LUCIR", 5]) == 1
    assert not others
    _, others = verdicts.sort_out([replace(old, config=config | {"gone": 14})], "cifar100-cpu")
    assert [departs for _, departs in others] == [["gone 14"]]


def test_the_page(tmp_path):
    found = [
        made("lucir", "cosine", seed, average=50.0 + seed, cached=seed == 2) for seed in (1, 2)
    ]
    found.append(made("lucir", "cosine", 1, average=59.9, lr=0.01))
    directory = tmp_path / "cifar100-cpu"
    directory.mkdir()
    for number, each in enumerate(found):
        (directory / f"{number}.json").write_text(json.dumps({"format": 1, **vars(each)}))
    out = tmp_path / "docs" / "results.md"
    main(["write", str(directory), "--out", str(out)])
    text = out.read_text()
    assert "| LUCIR | 5 | 2 | 51.50 ± 0.71 |" in text
    assert text.count("Not run: LwF; iCaRL; BiC; LUCIR, cosine on the grid; Mnemonics;") == 1
    assert text.count("| LUCIR | 5 | 2 |") == 4  # a table for each classifier
    assert "## AME (oracle)" in text
    assert "at most 150 images a class" in text
    assert (
        "resnet32, 50 classes and then 5 phases unless the column T says otherwise, 20 exemplars a class, 16 epochs in phase 0 and 6"
        in text
    )
    assert (
        "| LUCIR | 5 | 10.00 | 2.00 ± 0.00 |" in text
    )  # minutes; the cached base phase does not count
    assert "lr 0.01 instead of 0.05" in text
    assert "commits abc1234" in text
    assert "### " not in text  # LUCIR alone is compared with nothing
    assert "Two readings" not in text


def test_a_directory_that_is_named_like_no_preset_needs_one(tmp_path):
    out = tmp_path / "page.md"
    command = ["write", str(tmp_path), "--out", str(out)]
    with pytest.raises(SystemExit, match="cifar100-quarter"):  # an allowed value
        main(command)
    main([*command, "--preset", "cifar100-quarter"])
    assert "# Results: cifar100-quarter" in out.read_text()


def test_page_without_any_run(tmp_path):
    assert "CE + Cos; CE + GeoDL; Joint training." in verdicts.page([], "cifar100-cpu")


@pytest.mark.parametrize("preset", sorted({path.parent.name for path in RESULTS.glob("*/*.json")}))
def test_the_results_of_this_project(preset):
    """The files under results/ are of this version, and the page of their preset is what they give."""
    found = records.read(RESULTS / preset)
    names = [record.file_name for record in found]
    assert sorted(names) == sorted(path.name for path in (RESULTS / preset).iterdir())
    _, others = verdicts.sort_out(found, preset)
    departures = {
        why
        for record, departs in others
        if record.training in verdicts.ROWS.values()
        for why in departs
    }
    assert departures <= {
        "outer_rate 1.0 instead of 0.25"
    }  # kept: the figures that the shorter step is compared with
    assert verdicts.page(found, preset) == (ROOT / "docs" / "results" / f"{preset}.md").read_text()


# -- the page of the reproduction


def test_the_page_of_the_reproduction_is_written_from_the_kept_files(tmp_path):
    reproduction.main([str(RESULTS / "cifar100-cpu"), "--out", str(tmp_path / "page.md")])
    assert (tmp_path / "page.md").read_text() == (ROOT / "docs/reproduction.md").read_text()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([2.1], "reproduced"),
        ([-2.1], "not reproduced"),
        ([1.9], "not decided"),
        ([0.9, 1.0, 1.1], "reproduced"),
        ([-0.9, -1.0, -1.1], "not reproduced"),
        ([3.0, 5.0, -4.0], "not decided"),
    ],
)
def test_a_claim_is_judged_by_an_interval_or_a_clear_difference(values, expected):
    assert reproduction.verdict(Difference(values)) == expected


def test_claims_about_forgetting_phases_and_growth_have_the_sense_of_the_paper():
    def made(seed, average, forgetting, accuracy):
        result = {"average": average, "forgetting": forgetting, "accuracy": accuracy}
        return Record({}, seed, None, {}, [], False, {"nme": result})

    ours, theirs = (Training("lucir", loss, 50, 5) for loss in ("geodesic", "cosine"))
    later = [replace(each, phases=10) for each in (ours, theirs)]
    runs = {
        ours: [made(1, 60.0, 10.0, [70, 62, 61])],
        theirs: [made(1, 59.0, 14.0, [70, 60, 62]), made(2, 1.0, 1.0, [0, 0, 0])],
        later[0]: [made(1, 58.0, 0.0, [0])],
        later[1]: [made(1, 55.0, 0.0, [0])],
    }
    first = Claim("table1", ours, theirs, "nme")
    assert first.found(runs).values == [1.0]
    assert replace(first, measure="forgetting").found(runs).values == [4.0]
    assert replace(first, measure=reproduction.WORST).found(runs).values == [-1]
    more = Claim("table1", *later, "nme", than=first)
    assert more.found(runs).values == [2.0]
    assert (first.published, more.published) == (
        pytest.approx(65.14 - 63.17),
        pytest.approx(65.03 - 60.14 - (65.14 - 63.17)),
    )
    assert Claim("table1", ours, Training("bic", "lwf", 50, 5), "nme").found(runs) is None
