"""The pages of results: verdicts, comparisons with the paper, rows and departures."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from studies import records, reproduction, verdicts
from studies.records import Record
from studies.reproduction import Claim
from studies.results import main
from studies.verdicts import Difference, verdict

from geodl.bench.paper.grid import Training
from geodl.bench.report.published import REPETITION
from geodl.bench.report.tables import AVERAGE
from geodl.config import Layer, preset_layer
from geodl.methods import configure

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
PRESET = "cifar100-cpu"


def made(method, distill, seed, average, measures=None, preset=PRESET, **options):
    """Return an invented record; measures: results that differ from the defaults."""
    layers = [preset_layer(preset), Layer("", {"method": method, "distill": distill, **options})]
    identity = configure(layers).config.identity()
    config = {key: value for key, value in identity.items() if key not in REPETITION}
    result = {"average": average, "average_incremental": average, "forgetting": 10.0, "final": 50.0}
    result |= measures or {}
    result["accuracy"] = [result["final"]]
    results = {name: dict(result) for name in ("cnn", "nme", "ame", "ncm")}
    machine = {"device": "cpu", "machine": "x86_64", "threads": 1, "torch": "2"}
    return Record(config, seed, "abc1234", machine, [600.0, 60.0, 60.0], False, results)


def seeds(method, distill, *averages, **how):
    """Return the records of seeds 1, 2, ..."""
    return [made(method, distill, seed, each, **how) for seed, each in enumerate(averages, 1)]


def rows_of(found):
    """Return the rows that records fill; none departs from the preset."""
    rows, others = verdicts.sort_out(found, PRESET)
    assert not others
    return rows


@pytest.mark.parametrize(
    ("values", "words", "claim"),
    [
        ([1.0, 1.1, 0.9], "better", "reproduced"),
        ([-1.0, -1.1, -0.9], "worse", "not reproduced"),
        # The mean is above its deviation, but the interval reaches below zero.
        ([1.0, 0.1, 2.0], "not decided", "not decided"),
        ([3.0, 5.0, -4.0], "not decided", "not decided"),
        ([5.0, 5.1], "not decided", "reproduced"),
        ([2.1], "not decided", "reproduced"),
        ([-2.1], "not decided", "not reproduced"),
        ([1.9], "not decided", "not decided"),
        ([0.0, 0.0, 0.0], "not decided", "not decided"),
    ],
)
def test_verdicts(values, words, claim):
    """A claim of the paper is judged by the interval, or by a clear difference of one run or two."""
    assert verdict(Difference(values)) == words
    assert verdict(Difference([-value for value in values]), lower_is_better=True) == words
    assert reproduction.verdict(Difference(values)) == claim


@pytest.mark.parametrize("degrees", range(1, 11))
def test_students_t_leaves_one_in_forty_on_each_side(degrees):
    # Fine near zero, where the density is.
    x = np.tan(np.linspace(0, np.arctan(verdicts.T_95[degrees - 1]), 20_001))
    gammas = math.gamma((degrees + 1) / 2) / math.gamma(degrees / 2)
    density = gammas / math.sqrt(degrees * math.pi) * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
    assert np.trapezoid(density, x) == pytest.approx(0.475, abs=2e-5)


def test_differences_are_taken_seed_by_seed():
    one = seeds("finetune", "geodesic", 60.0, 64.0, 62.0)
    other = [made("finetune", "cosine", *each) for each in ((3, 61.0), (1, 58.0), (4, 0.0))]
    found = verdicts.difference(one, other, ("nme", "nme"), "average")
    assert list(found.values) == [2.0, 1.0]
    low, high = found.interval
    assert (low + high) / 2 == pytest.approx(1.5)
    assert (high - low) / 2 == pytest.approx(12.706 * 0.5)
    assert verdicts.difference(one, [], ("nme", "nme"), "average") is None


def judged(found, measure):
    """Give the cells of each comparison under each classifier: seeds, difference, in the paper, verdict."""
    table = {}
    compared = verdicts.comparisons(rows_of(found), verdicts.PAIRS, measure)
    for name, _, count, *cells in compared.rows:
        table |= {(name, "CNN"): [count, *cells[:3]], (name, "k-NME"): [count, *cells[3:]]}
    return table


def test_comparisons_show_the_interval_and_the_papers_difference():
    found = seeds("finetune", "geodesic", 60.0, 63.0, 61.5)
    found += seeds("finetune", "cosine", 58.0, 60.5, 59.5)
    found += [made("finetune", "lwf", 1, 57.5), made("finetune", "none", 1, 40.0)]
    table = judged(found, AVERAGE)
    count, shown, published, words = table["CE + GeoDL against CE + Cos", "k-NME"]
    assert (count, shown, words) == (3, "+2.17 (+1.45 to +2.88)", "better")
    assert published == pytest.approx(61.40 - 60.09)
    assert table["CE + GeoDL against CE + Cos", "CNN"][2] == pytest.approx(58.54 - 59.82)
    alone = table["CE + Cos against CE + LwF", "CNN"]
    assert alone[1:] == ["+0.50", pytest.approx(6.98), "not decided"]
    assert ("LUCIR + GeoDL against LUCIR", "k-NME") not in table


def test_less_forgetting_is_better():
    less = [made("lucir", "geodesic", s, 1.0, {"forgetting": 8.0 + s / 10}) for s in (1, 2, 3)]
    table = judged([*less, *seeds("lucir", "cosine", 1.0, 1.0, 1.0)], "forgetting")
    _, shown, published, words = table["LUCIR + GeoDL against LUCIR", "CNN"]
    assert (shown, words) == ("-1.80 (-2.05 to -1.55)", "better")
    assert published == pytest.approx(9.49 - 18.70)


def test_the_two_readings_stand_side_by_side_for_every_t():
    found = []
    for t in (5, 10):
        one = made("lucir", "geodesic", 1, 60.0, phases=t)
        oracle = {"ame": one.results["ame"] | {"average": 63.0}}
        found += [replace(one, results=one.results | oracle)]
        found += [made("lucir", "cosine", 1, 59.0, phases=t)]
    table = {(row[0], row[1]): row[2:] for row in verdicts.readings(rows_of(found)).rows}
    assert len(table) == 12
    assert table[10, "CNN"][0] == "+1.00"
    assert table[5, "AME (oracle) against CNN"][:2] == ["+4.00", pytest.approx(65.14 - 63.17)]
    assert table[10, "AME (oracle) against CNN"][1] == pytest.approx(65.03 - 60.14)
    both = table[5, "AME (oracle) against CNN, LUCIR on both sides"]
    assert both == ["+0.00", None, "+0.00", None]


def test_the_page_of_the_closed_form():
    found = []
    for t in (5, 25):
        for one in seeds("analytic", "none", 61.0, 62.0, preset="cifar100-analytic", phases=t):
            results = dict.fromkeys(("analytic", "analytic_single"), one.results["cnn"])
            found.append(replace(one, results=results))
    for options in ({"epochs": 120}, {"distill": "geodesic"}):  # other trainings, no further seeds
        found.append(replace(found[0], seed=3, config=found[0].config | options))
    text = verdicts.page(found, "cifar100-analytic")
    ours = "| geodl: closed form, with the mirrored view | average 0..T"
    assert f"{ours} | 61.50 ± 0.71 | 61.50 ± 0.71 |" in text
    assert "| LUCIR + GeoDL (the paper's Table 1) | average 1..T | 65.14 | 63.12 |" in text
    assert "30 epochs in phase 0." in text
    assert "| 25 | 2 | 62.00 |" in text


def test_one_training_fills_both_its_rows_and_departures_stand_apart():
    found = [
        made("lwf", "lwf", 1, 50.0),
        made("finetune", "geodesic", 1, 60.0),
        made("finetune", "geodesic", 1, 61.0, geodesic_weight=14.0),
        made("joint", "none", 1, None, phases=0),
        made("bic", "geodesic", 1, 60.0),
        made("icarl", "lwf", 1, 51.0),
        made("lucir", "cosine", 1, 50.0),
        made("lucir", "cosine", 1, 51.0, cosine_features="grid"),
    ]
    rows, others = verdicts.sort_out(found, PRESET)
    averages = {
        name: [record.value("cnn", "average") for record in records]
        for (name, t), records in rows.items()
        if t == 5
    }
    assert averages == {
        "LwF": [50.0],
        "iCaRL": [50.0],
        "iCaRL + GeoDL": [60.0],
        "CE + GeoDL": [60.0],
        "Joint training": [None],
        "LUCIR": [50.0],
        "LUCIR, cosine on the grid": [51.0],
    }
    departures = [departs for _, departs in others]
    assert departures == [["geodesic_weight 14.0 instead of 6.0"], [], ["the same once more"]]


def joint(seed, final, phases):
    return made("joint", "none", seed, None, {"final": final}, phases=phases)


def test_a_joint_run_of_all_classes_serves_each_t_that_has_none_of_its_seed():
    every = [joint(1, 60.0, 0), joint(1, 61.0, 5), joint(2, 62.0, 0)]
    rows = rows_of([*every, made("lucir", "cosine", 1, 50.0, phases=10)])
    assert [record.value("cnn", "final") for record in rows["Joint training", 5]] == [61.0, 62.0]
    assert [record.value("cnn", "final") for record in rows["Joint training", 10]] == [60.0, 62.0]
    alone = every[:1]
    assert verdicts.sort_out(alone, PRESET) == ({("Joint training", 0): alone}, [])
    assert "| Joint training | 0 | 1 |  |  | 60.00 |" in verdicts.page(alone, PRESET)
    rows, others = verdicts.sort_out(every[:2], PRESET)
    assert rows == {("Joint training", 5): every[1:2]}
    assert others == [(every[0], ["the same once more"])]


def test_what_a_preset_leaves_open_and_what_older_records_lack_is_no_departure():
    one = made("lucir", "cosine", 1, 50.0, precision="32")
    other = made("lucir", "cosine", 2, 50.0, precision="bf16")
    assert len(rows_of([one, other])["LUCIR", 5]) == 2
    other = replace(other, machine=other.machine | {"precision": "bf16"})
    shared = "1 run on cpu (x86_64), 1 thread, precision"
    text = verdicts.page([one, other], PRESET)
    assert f"{shared} 32, torch 2; {shared} bf16, torch 2; commits" in text
    config = {key: value for key, value in one.config.items() if key != "cosine_features"}
    assert len(rows_of([replace(one, config=config | {"gone": None})])["LUCIR", 5]) == 1
    _, others = verdicts.sort_out([replace(one, config=config | {"gone": 14})], PRESET)
    assert [departs for _, departs in others] == [["gone 14"]]


def test_the_page(tmp_path):
    one, other = seeds("lucir", "cosine", 51.0, 52.0)
    found = [one, replace(other, cached=True), made("lucir", "cosine", 1, 59.9, lr=0.01)]
    directory, out = tmp_path / PRESET, tmp_path / "docs" / "results.md"
    directory.mkdir()
    for number, each in enumerate(found):
        (directory / f"{number}.json").write_text(json.dumps({"format": 1, **vars(each)}))
    main(["write", str(directory), "--out", str(out)])
    text = out.read_text()
    assert text.count("Not run: LwF; iCaRL; BiC; LUCIR, cosine on the grid; Mnemonics;") == 1
    assert text.count("| LUCIR | 5 | 2 | 51.50 ± 0.71 |") == 4  # a table for each classifier
    for words in ("## AME (oracle)", "at most 150 images per class", "16 epochs in phase 0 and 6"):
        assert words in text
    # Minutes; the cached base phase does not count.
    assert "| LUCIR | 5 | 10.00 | 2.00 ± 0.00 |" in text
    assert "lr 0.01 instead of 0.05" in text
    assert "commits abc1234" in text
    assert "### " not in text  # LUCIR alone is compared with nothing
    assert "Two readings" not in text
    assert "CE + Cos; CE + GeoDL; Joint training." in verdicts.page([], PRESET)


def test_a_directory_that_is_named_like_no_preset_needs_one(tmp_path):
    out = tmp_path / "page.md"
    command = ["write", str(tmp_path), "--out", str(out)]
    with pytest.raises(SystemExit, match="cifar100-quarter"):  # an allowed value
        main(command)
    main([*command, "--preset", "cifar100-quarter"])
    assert "# Results: cifar100-quarter" in out.read_text()


@pytest.mark.parametrize("preset", sorted({path.parent.name for path in RESULTS.glob("*/*.json")}))
def test_the_results_of_this_project(preset):
    """The files under results/ are of this version, and the page of their preset is what they give."""
    found = records.read(RESULTS / preset)
    names = [record.file_name for record in found]
    assert sorted(names) == sorted(path.name for path in (RESULTS / preset).iterdir())
    _, others = verdicts.sort_out(found, preset)
    ours = [departs for record, departs in others if record.training in verdicts.ROWS.values()]
    # Kept: the figures that the shorter step is compared with.
    assert all(departs == ["outer_rate 1.0 instead of 0.25"] for departs in ours)
    assert verdicts.page(found, preset) == (ROOT / "docs" / "results" / f"{preset}.md").read_text()


def test_the_page_of_the_reproduction_is_written_from_the_kept_files(tmp_path):
    reproduction.main([str(RESULTS / "cifar100-cpu"), "--out", str(tmp_path / "page.md")])
    assert (tmp_path / "page.md").read_text() == (ROOT / "docs/reproduction.md").read_text()


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
    assert first.published == pytest.approx(65.14 - 63.17)
    assert more.published == pytest.approx(65.03 - 60.14 - (65.14 - 63.17))
    assert Claim("table1", ours, Training("bic", "lwf", 50, 5), "nme").found(runs) is None
