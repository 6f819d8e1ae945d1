"""The report: what is read from runs, tables, figures, and the page as text (test_browser.py opens it)."""

import base64
import csv
import hashlib
import html.parser
import io
import json
import re
import shlex
import shutil
import statistics
from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers import tiny
from tests.helpers.directories import cut, rewrite
from tests.helpers.reports import EVIL, NAMES, Checker, evil_page, render

from geodl.bench.report import page, plots, sections
from geodl.bench.report.figures import CSS, Curve, heat, lines
from geodl.bench.report.published import numbers
from geodl.bench.report.results import Estimate, estimate, read_run, read_settings
from geodl.bench.report.tables import (
    Best,
    Points,
    Table,
    compare,
    comparison_table,
    comparisons,
    summary,
    write_tables,
)
from geodl.cli import app
from geodl.cli.options import effective
from geodl.cli.report import report
from geodl.core.errors import StoreError
from geodl.core.text import printable
from geodl.learning.learner import Learner
from geodl.store import Directory

# Results


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
    event = next(
        event for event in store.read_events() if event["kind"] == "epoch" and event["phase"] == 3
    )
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
    assert [(s.label.split(", ")[-1], len(s.runs)) for s in settings] == [
        ("flowers", 1),
        ("birds", 1),
    ]
    page.render(settings)


def test_labels_say_what_differs(runs):
    labels = [
        s.label
        for s in read_settings([runs / "geo-1", runs / "partial", runs / "none", runs / "base"])
    ]
    assert labels == [
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
        assert setting.accuracy(classifier)[-1].mean == pytest.approx(
            setting.value(classifier, "final").mean
        )


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
    assert config.identity() == {
        key: value for key, value in found.config.items() if key != "fingerprint"
    }
    assert config.threads == 1


def test_no_run_is_a_plain_error(tmp_path):
    with pytest.raises(StoreError, match="one or more are needed"):
        read_settings([])
    with pytest.raises(StoreError, match=re.escape(str(tmp_path))):
        read_settings([tmp_path])


# Tables


TABLE = Table(
    ["name", "ours", "n", "difference"],
    [
        ["a|b_c", Estimate(61.234, 0.5, 3), 20, Points(-1.5)],
        ["50 %", Estimate(7.0, None, 1), None, Points(2.0)],
    ],
    ["A note."],
)


def test_a_table_in_every_format():
    assert TABLE.markdown() == (
        "| name | ours | n | difference |\n| --- | ---: | ---: | ---: |\n"
        "| a\\|b_c | 61.23 ± 0.50 | 20 | -1.50 |\n| 50 % | 7.00 |  | +2.00 |\n\nA note.\n"
    )
    # Full precision, and columns of their own for spread and number of runs.
    assert list(csv.reader(io.StringIO(TABLE.csv()))) == [
        ["name", "ours", "ours spread", "ours runs", "n", "difference"],
        ["a|b_c", "61.234", "0.5", "3", "20", "-1.5"],
        ["50 %", "7.0", "", "1", "", "2.0"],
    ]
    assert TABLE.latex() == (
        "\\begin{tabular}{lrrr}\n\\toprule\nname & ours & n & difference \\\\\n\\midrule\n"
        "a|b\\_c & 61.23 $\\pm$ 0.50 & 20 & $-$1.50 \\\\\n50 \\% & 7.00 &  & +2.00 \\\\\n"
        "\\bottomrule\n\\end{tabular}\n% A note.\n"
    )


@given(st.text(alphabet="ab&%$#_{}~^\\", max_size=12))
def test_no_name_can_break_latex(name):
    line = Table(["x"], [[name]]).latex().splitlines()[4].removesuffix(r" \\")
    for word in (
        r"\textbackslash{}",
        r"\textasciitilde{}",
        r"\textasciicircum{}",
        *(f"\\{c}" for c in "&%$#_{}"),
    ):
        line = line.replace(word, "")
    assert set(line) <= set("ab")


def test_the_summary_marks_ame_as_an_oracle(runs):
    table = summary(read_settings([runs / "geo-1", runs / "none"]))
    names = [row[1] for row in table.rows]
    assert names == [
        "CNN",
        "k-NME",
        "AME (oracle)",
        "NCM (SDC)",
        "CNN",
        "AME (oracle)",
        "NCM (SDC)",
    ]
    assert any("oracle" in words for words in table.notes)


def test_cited_numbers_are_compared_with_the_average_that_counts_phase_0(runs):
    setting = read_settings([runs / "cifar"])[0]
    result = read_run(runs / "cifar").results
    found = comparisons([setting])
    assert Counter(each.published.metric for each in found) == {"average": 3, "forgetting": 3}
    for each in found:
        ours = result[each.classifier]
        if each.published.metric == "average":
            assert each.published.value == 63.17
            assert each.against == "average 0..T"
            assert each.difference == pytest.approx(ours["average_incremental"] - 63.17)
            assert each.found["average 1..T"].mean == ours["average"]
        else:
            assert each.difference == pytest.approx(ours["forgetting"] - 18.70)
    own = next(n for n in numbers() if n.row == "LUCIR + GeoDL" and n.dataset == "cifar100")
    assert [each.against for each in compare(own, setting)] == ["average 1..T"] * 3
    rows = comparison_table(found).rows
    assert [row[5] for row in rows] == ["CNN", "k-NME", "AME (oracle)"] * 2
    assert any(
        "does not say under which classifier" in words for words in comparison_table(found).notes
    )


def test_two_settings_beside_one_number_are_told_apart(runs, tmp_path):
    one = read_settings([runs / "cifar"])[0]
    two = comparison_table(comparisons([one, replace(one, label="another")]))
    assert two.header[2:4] == ["method", "setting"]
    assert {row[3] for row in two.rows} == {"LUCIR", "another"}
    assert "setting" not in comparison_table(comparisons([one])).header


def test_a_number_without_a_run_stands_alone():
    number = numbers()[0]
    (row,) = comparison_table(compare(number, None)).rows
    ours = [None] * 3
    assert row == [
        *("Table 1", "CIFAR-100", "LwF", 5, 20, "CNN"), *ours, 49.59, "average 0..T", None,
    ]  # fmt: skip


def test_incomplete_runs_are_not_compared(runs, tmp_path):
    shutil.copytree(runs / "cifar", tmp_path / "cifar")
    cut(tmp_path / "cifar", 5)
    assert comparisons(read_settings([tmp_path / "cifar"])) == []


def test_tables_are_written_in_every_format(runs, tmp_path):
    paths = write_tables(read_settings([runs / "cifar"]), tmp_path / "tables")
    assert sorted(path.name for path in paths) == [
        f"{name}.{kind}" for name in ("published", "results") for kind in ("csv", "md", "tex")
    ]
    assert "63.17" in (tmp_path / "tables" / "published.md").read_text()


# Figures


def test_colors_of_a_figure_in_the_page_are_variables():
    plot = lines(
        "p", [Curve("one", [1, 2], [3.0, 4.0]), Curve("two", [1, 2], [4.0, None])], x="x", y="y (%)"
    )
    svg = plot.inline("f")
    assert not any(color in svg for color in CSS)
    assert {"var(--ink)", "var(--muted)", "var(--series-0)", "var(--series-1)"} <= set(
        re.findall(r"var\(--[\w-]+\)", svg)
    )
    assert "http" not in svg
    assert re.match(r'<svg role="img" aria-label="y \(%\), by x: one, two" viewBox="[\d. ]+">', svg)
    ids = re.findall(r'\bid="([^"]*)"', svg)
    assert all(name.startswith("f-") for name in ids)
    assert set(re.findall(r'(?:url\(|href=")#([^")]*)', svg)) <= set(ids)


def drawn(count, label="{}"):
    curves = [Curve(label.format(i), [1, 2, 3], [float(i), 2.0, 3.0]) for i in range(count)]
    plot = lines("p", curves, x="x", y="y")
    plot.inline("f")  # lays it out; warnings are errors
    return plot.figure


@pytest.mark.parametrize(
    ("count", "label"),
    [
        (2, "{}"),
        (18, "LUCIR + GeoDL, phases {}"),
        (50, "LUCIR + GeoDL, phases 25, exemplars {}"),
        (3, 15 * "word " + "{}"),
    ],
)
def test_a_legend_takes_nothing_from_the_axes_and_stays_inside(count, label):
    figure = drawn(count, label)
    axes, legend = figure.axes[0].get_window_extent(), figure.legends[0].get_window_extent()
    assert axes.height > 1.2 * figure.dpi
    assert legend.x0 >= 0
    assert legend.x1 <= figure.bbox.width
    assert legend.y1 < axes.y0


def test_no_two_curves_look_alike():
    looks = [
        (c.get_color(), str(c._unscaled_dash_pattern), c.get_marker())
        for c in drawn(50).axes[0].get_lines()
    ]
    assert len(set(looks)) == 50
    assert len({look[:2] for look in looks[:18]}) == 18  # also without their markers
    oracle = (
        lines("p", [Curve("o", [1, 2], [1.0, 2.0], dashed=True)], x="x", y="y")
        .figure.axes[0]
        .get_lines()[0]
    )
    assert str(oracle._unscaled_dash_pattern) not in {look[1] for look in looks}


def test_epochs_are_whole():
    axes = lines("p", [Curve("loss", [1, 2, 3], [3.0, 2.0, 1.0])], x="epoch", y="y").figure.axes[0]
    assert all(tick == round(tick) for tick in axes.get_xticks())


def test_a_dense_matrix_names_its_columns_on_top():
    names = [f"class {i}" for i in range(30)]
    figure = heat(
        "h", np.eye(30) * 100, rows=names, columns=names, x="predicted", y="true", tips={}
    ).figure
    axes = figure.axes[0]
    assert axes.xaxis.get_label_position() == "top"
    assert axes.get_title() == ""
    tops = [text for text in axes.texts if text.get_rotation() == 90]
    assert len(tops) == 30
    assert all(text.xy[1] == 1 for text in tops)


def test_bands_are_for_one_setting_alone(runs):
    one, two = read_settings([runs / "geo-1", runs / "cos"])
    for draw in (plots.angles, plots.drift):
        assert len(draw([one])[0].figure.axes[0].collections) == 1
        both = draw([one, two])[0].figure.axes[0]
        assert len(both.collections) == 0
        assert [line.get_label() for line in both.get_lines()][:2] == ["LUCIR + GeoDL", "LUCIR"]
    assert plots.drift(read_settings([runs / "none"])) == []
    marked = [text.get_text() for text in plots.drift([one])[0].figure.axes[0].texts]
    assert marked == ["1", "2", "3"]


def test_each_point_has_its_tip():
    plot = lines(
        "p",
        [Curve("one", [4, 6, 8], [90.0, None, 70.0], [88.0, None, 69.0], [92.0, None, 71.0])],
        x="x",
        y="y",
    )
    assert plot.tips == {
        "line-0": ["one\nx 4: 90.00 % (88.00 to 92.00)", "one\nx 8: 70.00 % (69.00 to 71.00)"]
    }
    root = ElementTree.fromstring(plot.inline("f"))
    assert len(root.findall(".//*[@id='f-line-0']//use")) == 2


def test_heat_is_opacity_and_nothing_where_nothing_is_known():
    def opacity(matrix, root):
        names = [str(i) for i in range(len(matrix))]
        plot = heat(
            "h", np.array(matrix), rows=names, columns=names, x="x", y="y", tips={}, root=root
        )
        return plot.figure.axes[0].images[0].get_array()[..., 3].tolist()

    assert opacity([[100.0, np.nan], [0.0, 25.0]], root=False) == [[217, 0], [0, 54]]
    assert opacity([[25.0]], root=True) == [[108]]


def test_names_with_dollars_and_missing_letters_are_drawn():
    plot = heat(
        "h",
        np.eye(2) * 100,
        rows=["$x^2$", "小猫"],
        columns=["$x^2$", "小猫"],
        x="x",
        y="y",
        tips={},
    )
    svg = plot.inline("f")
    assert "$x^2$" in svg
    assert "小猫" in svg


def test_figures_are_files_for_papers(runs, tmp_path):
    paths = plots.write_figures(read_settings([runs / "none"]), tmp_path)
    names = {path.name for path in paths}
    stems = {"accuracy", "forgetting", "training"} | {
        f"{k}-{c}" for k in ("groups", "confusion") for c in ("cnn", "ame", "ncm")
    }
    assert names == {f"{stem}.{kind}" for stem in stems for kind in ("svg", "pdf")}
    for path in paths:
        assert path.read_bytes().startswith(b"%PDF" if path.suffix == ".pdf" else b"<?xml")


def test_equal_figures_are_equal_bytes(runs, tmp_path):
    settings = read_settings([runs / "geo-1", runs / "geo-2"])
    first, second = (
        [path.read_bytes() for path in plots.similarity(settings)[0].files(tmp_path)]
        for _ in range(2)
    )
    assert first == second


# The page


PAGES = {
    "one": ["geo-1"],
    "several": ["geo-1", "geo-2", "none"],
    "many": ["geo-1", "cos", "base", "partial"],
    "partial": ["partial"],
    "nothing": ["nothing"],
    "base": ["base"],
    "none": ["none"],
    "own": ["own"],
    "cifar": ["cifar"],
}


@pytest.mark.parametrize("name", PAGES)
def test_every_page_is_sound_and_asks_for_nothing(runs, name):
    text = render(runs, *PAGES[name])
    checked = Checker(text)
    assert [x for x, count in Counter(checked.ids).items() if count > 1] == []
    assert all(address.startswith(("data:image/", "#")) for address in checked.addresses)
    assert {address[1:] for address in checked.addresses if address[0] == "#"} <= set(checked.ids)
    assert re.findall(r"https?://|url\((?!#)|@import|\bfetch\(|XMLHttpRequest", text) == []
    assert text.count("<script>") == 1
    assert "default-src 'none'" in text


def test_the_page_of_a_run_has_all_its_parts(runs):
    text = render(runs, "geo-1")
    ids = Checker(text).ids
    assert set("results curves representation classes exemplars training origin".split()) <= set(
        ids
    )
    drawn = (
        "accuracy forgetting similarity angles angles-training training groups-nme confusion-ncm"
    )
    for plot in drawn.split():
        assert f'data-prefix="{plot}"' in text
    assert text.count('src="data:image/webp') == 6
    assert "geodl run --method lucir --distill geodesic" in text
    assert "<dt>python</dt>" in text
    assert "<dt>subspace_dim</dt>" in text


def test_class_names_are_escaped(runs):
    text = render(runs, "geo-1")
    data = re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)
    assert len(data) == text.count('class="plot"')
    assert any(NAMES[3] in json.loads(each).get("heat", {}).get("rows", []) for each in data)
    assert not any("<" in each for each in data)
    assert "$x^2$ </script>" not in text
    assert "$x^2$ &lt;/script&gt;&amp;" in text
    assert "小猫" in text


def test_evil_names_are_text(runs):
    for text in evil_page(runs):
        words = {" ".join(each.split()) for each in Checker(text).words}
        assert {printable(name) for name in EVIL} <= words
        assert text.count("<script>") == 1
        data = re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)
        assert len(data) == text.count('class="plot"')
        assert not any("<" in each for each in data)
        named = [json.loads(each)["heat"]["rows"] for each in data if '"totals"' in each]
        assert all(sorted(rows) == sorted(map(printable, EVIL)) for rows in named)


def test_evil_names_in_tables_and_figures(runs, tmp_path):
    table = Table(["class"], [[name] for name in EVIL])
    assert len(table.markdown().splitlines()) == len(EVIL) + 2
    assert len(table.latex().splitlines()) == len(EVIL) + 6
    plot = lines("p", [Curve(name, [1, 2], [3.0, 4.0]) for name in EVIL], x="x", y="y")
    for path in plot.files(tmp_path):
        assert path.stat().st_size > 1000
    written = "".join(ElementTree.fromstring(plot.inline("f")).itertext())
    assert all(printable(name) in written for name in EVIL)


def source(script):
    """Return how a policy names an inline script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def test_the_policy_allows_the_script_of_the_page_alone(runs):
    text = render(runs, "base")
    script = re.search("<script>(.*?)</script>", text, re.DOTALL)[1]
    assert f"script-src '{source(script)}';" in html.unescape(text)


def test_ame_never_stands_alone(runs):
    words = " ".join(Checker(render(runs, *PAGES["several"])).words)
    for match in re.finditer(r"\bAME\b(.{0,30})", words, re.DOTALL):
        assert "oracle" in match[1] or "AME needs data" in match[0], match[0]


def test_photographs_are_shown_only_when_asked_for(runs):
    assert "data:image/webp" not in render(runs, "own")
    assert "--with-images" in render(runs, "own")
    assert "data:image/webp" in render(runs, "own", with_images=True)
    assert "data:image/webp" in render(runs, "base")
    assert "data:image/webp" not in render(runs, "base", with_images=False)


def test_without_exemplars_there_is_no_nme(runs):
    text = render(runs, "none")
    assert "k-NME" not in "".join(Checker(text).words)
    assert "No images are kept." in text
    assert 'id="representation"' not in text


def test_what_is_not_there_yet_is_not_shown(runs):
    assert "3 of 4 phases complete." in render(runs, "partial")
    assert "No phase is complete yet." in render(runs, "nothing")
    base = render(runs, "base")
    assert 'id="curves"' not in base
    assert "forgetting</th>" not in base
    assert 'data-prefix="confusion-nme"' in base


def test_the_page_stands_beside_the_paper_and_says_where_it_departs(runs):
    text = "".join(Checker(render(runs, "cifar")).words)
    assert "Beside the paper" in text
    assert "63.17" in text
    assert (
        "network convnet instead of resnet32, scale 10.0 instead of 1.0, epochs 1 instead of 160"
        in text
    )
    assert "Beside the paper" not in render(runs, "geo-1")


def test_one_box_says_how_all_settings_depart(runs, monkeypatch):
    monkeypatch.setattr(page, "details", lambda settings, with_images: [])  # they take seconds
    one = read_settings([runs / "cifar"])[0]
    other = changed(one, "other", epochs=2)
    unmatched = changed(one, "unmatched", exemplars=7)

    def boxes(settings):
        return re.findall(
            r'<(?:p|div) class="warning">(.*?)</(?:p|div)>', page.render(settings), re.DOTALL
        )

    (box,) = boxes([one, replace(one, label="twin"), unmatched])
    assert box.startswith(
        "Not trained as in the paper, so the numbers need not agree: network convnet"
    )
    (box,) = boxes([one, replace(one, label="twin"), other, unmatched])
    assert "<b>LUCIR; twin</b>: network convnet" in box
    assert "<b>other</b>: network convnet" in box
    assert "unmatched" not in box


def changed(setting, label, results=None, **options):
    """Give a setting with other options, and with other results under k-NME."""
    run = replace(setting.first, config={**setting.first.config, **options})
    run.results["nme"].update(results or {})
    return replace(setting, label=label, runs=(run,))


def bold(settings):
    """Return the labels of the rows whose average is best under k-NME."""
    part = dict(sections.results(settings)["parts"])["k-NME"]
    column = part.header.index("average 1..T")
    return [row[0] for row in part.rows if isinstance(row[column], Best)]


def test_the_best_is_bold_among_complete_settings_of_one_protocol(runs):
    partial = read_settings([runs / "partial"])[0]
    six = read_settings([runs / "geo-1"])[0]
    low, high, tie = (
        changed(six, name, {"average": value})
        for name, value in (("low", 1.0), ("high", 2.0), ("tie", 2.001))
    )
    best = changed(partial, "partial", {"average": 99.0})
    assert bold([low, high, best]) == ["high"]
    assert bold([low, high, tie]) == ["high", "tie"]
    other = changed(read_settings([runs / "cifar"])[0], "cifar", {"average": 50.0})
    assert bold([low, high, other]) == ["high"]
    assert bold([low, other]) == []
    assert not any("Bold" in words for words in sections.results([low, other])["notes"])
    text = page.render([low, high])
    assert re.search(r"<tr>\s*<td>high</td>.*?<b>2\.00</b>", text, re.DOTALL)
    assert "<b>1.00</b>" not in text
    assert "Bold: the best mean" in text
    assert bold([low, high, other, replace(other, label="twin")]) == ["high", "cifar", "twin"]


def test_the_heading_says_what_all_settings_share_and_what_a_run_will_be(runs):
    def words(*names):
        return sections.heading(read_settings([runs / name for name in names]))["lead"]

    assert words("partial").startswith(
        "3 classes, then 3 phases of 1; 3 exemplars a class; network convnet."
    )
    assert words("nothing").startswith(
        "3 classes, then 3 phases; 3 exemplars a class; network convnet."
    )
    assert (
        words("geo-1", "cos")
        == "2 runs. 3 classes, then 3 phases of 1; 3 exemplars a class; network convnet."
    )
    assert words("geo-1", "none") == "2 runs. 3 classes, then 3 phases of 1; network convnet."
    assert words("geo-1", "cifar") == "2 runs. Network convnet."
    five, ten = (changed(read_settings([runs / "geo-1"])[0], "x") for _ in range(2))
    ten = replace(ten, runs=(replace(ten.first, total=11),))
    assert sections.heading([five, ten])["lead"].startswith(
        "2 runs. 3 classes at first; 3 exemplars"
    )


def test_what_many_settings_leave_out_is_said(runs):
    assert "without exemplars" in render(runs, *PAGES["many"])
    assert "without exemplars" not in render(runs, *PAGES["several"])


def test_the_command_writes_page_figures_and_tables(runs, tmp_path, capsys):
    shutil.copytree(runs / "base", tmp_path / "base")
    report([tmp_path / "base"], figures=tmp_path / "figures", tables=tmp_path / "tables")
    assert (tmp_path / "base" / "report.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "figures" / "confusion-cnn.pdf").exists()
    assert (tmp_path / "tables" / "results.tex").exists()
    assert "report.html" in capsys.readouterr().out
