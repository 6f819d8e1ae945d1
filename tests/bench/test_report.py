"""The page of a report, as text; test_browser.py opens it."""

import base64
import hashlib
import html.parser
import json
import re
import shutil
from collections import Counter
from dataclasses import replace

import pytest
from tests.helpers.reports import EVIL, Checker, evil_page, render

from geodl.bench.report import page, sections
from geodl.bench.report.results import read_settings
from geodl.bench.report.tables import Best
from geodl.cli.report import report
from geodl.core.text import printable

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
    names = "results curves representation classes exemplars training origin"
    assert set(names.split()) <= set(Checker(text).ids)
    plots = (
        "accuracy forgetting similarity angles angles-training training groups-nme confusion-ncm"
    )
    for plot in plots.split():
        assert f'data-prefix="{plot}"' in text
    assert text.count('src="data:image/webp') == 6
    assert "小猫" in text
    for words in ("geodl run --method lucir --distill geodesic", "<dt>python</dt>"):
        assert words in text
    assert "<dt>subspace_dim</dt>" in text


def data_of(text):
    """Return the data of each plot, which can end no script."""
    data = re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)
    assert len(data) == text.count('class="plot"')
    assert not any("<" in each for each in data)
    return [json.loads(each) for each in data]


def test_evil_names_are_text(runs):
    for text in evil_page(runs):
        words = {" ".join(each.split()) for each in Checker(text).words}
        assert {printable(name) for name in EVIL} <= words
        assert text.count("<script>") == 1
        named = [each["heat"]["rows"] for each in data_of(text) if "totals" in str(each)]
        assert all(sorted(rows) == sorted(map(printable, EVIL)) for rows in named)


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
    assert "No images are stored." in text
    assert 'id="representation"' not in text


def test_what_is_left_out(runs):
    assert "without exemplars" in render(runs, *PAGES["many"])
    assert "without exemplars" not in render(runs, *PAGES["several"])
    assert "3 of 4 phases complete." in render(runs, "partial")
    assert "No phase is complete yet." in render(runs, "nothing")
    base = render(runs, "base")
    assert 'id="curves"' not in base
    assert "forgetting</th>" not in base
    assert 'data-prefix="confusion-nme"' in base


def test_the_page_stands_beside_the_paper_and_says_where_it_departs(runs):
    text = "".join(Checker(render(runs, "cifar")).words)
    assert "Comparison with the paper" in text
    assert "63.17" in text
    for option in ("network convnet instead of resnet32", "scale 10.0 instead of 1.0"):
        assert f"{option}, " in text
    assert "epochs 1 instead of 160" in text
    assert "Comparison with the paper" not in render(runs, "geo-1")


def test_one_box_says_how_all_settings_depart(runs, monkeypatch):
    monkeypatch.setattr(page, "details", lambda settings, with_images: [])  # they take seconds
    one = read_settings([runs / "cifar"])[0]
    other = changed(one, "other", epochs=2)
    unmatched = changed(one, "unmatched", exemplars=7)

    def boxes(settings):
        box = r'<(?:p|div) class="warning">(.*?)</(?:p|div)>'
        return re.findall(box, page.render(settings), re.DOTALL)

    (box,) = boxes([one, replace(one, label="twin"), unmatched])
    assert box.startswith("Not trained as in the paper")
    assert "need not agree: network convnet" in box
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
    low = changed(six, "low", {"average": 1.0})
    high = changed(six, "high", {"average": 2.0})
    tie = changed(six, "tie", {"average": 2.001})
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

    shape, rest = "3 classes, then 3 phases", "3 exemplars per class; network convnet."
    assert words("partial").startswith(f"{shape} of 1; {rest}")
    assert words("nothing").startswith(f"{shape}; {rest}")
    assert words("geo-1", "cos") == f"2 runs. {shape} of 1; {rest}"
    assert words("geo-1", "none") == f"2 runs. {shape} of 1; network convnet."
    assert words("geo-1", "cifar") == "2 runs. Network convnet."
    five, ten = (changed(read_settings([runs / "geo-1"])[0], "x") for _ in range(2))
    ten = replace(ten, runs=(replace(ten.first, total=11),))
    lead = sections.heading([five, ten])["lead"]
    assert lead.startswith("2 runs. 3 classes at first; 3 exemplars")


def test_the_command_writes_page_figures_and_tables(runs, tmp_path, capsys):
    shutil.copytree(runs / "base", tmp_path / "base")
    report([tmp_path / "base"], figures=tmp_path / "figures", tables=tmp_path / "tables")
    assert (tmp_path / "base" / "report.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "figures" / "confusion-cnn.pdf").exists()
    assert (tmp_path / "tables" / "results.tex").exists()
    assert "report.html" in capsys.readouterr().out
