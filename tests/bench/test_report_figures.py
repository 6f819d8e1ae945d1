"""Figures of a report."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from tests.helpers.reports import EVIL

from geodl.bench.report import plots
from geodl.bench.report.figures import CSS, Curve, heat, lines
from geodl.bench.report.results import read_settings
from geodl.bench.report.tables import Table
from geodl.core.text import printable


def test_colors_of_a_figure_in_the_page_are_variables():
    curves = [Curve("one", [1, 2], [3.0, 4.0]), Curve("two", [1, 2], [4.0, None])]
    plot = lines("p", curves, x="x", y="y (%)")
    svg = plot.inline("f")
    assert not any(color in svg for color in CSS)
    variables = set(re.findall(r"var\(--([\w-]+)\)", svg))
    assert {"ink", "muted", "series-0", "series-1"} <= variables
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
    curves = drawn(50).axes[0].get_lines()
    looks = [(c.get_color(), str(c._unscaled_dash_pattern), c.get_marker()) for c in curves]
    assert len(set(looks)) == 50
    assert len({look[:2] for look in looks[:18]}) == 18  # also without their markers
    plot = lines("p", [Curve("o", [1, 2], [1.0, 2.0], dashed=True)], x="x", y="y")
    oracle = plot.figure.axes[0].get_lines()[0]
    assert str(oracle._unscaled_dash_pattern) not in {look[1] for look in looks}


def test_epochs_are_whole():
    axes = lines("p", [Curve("loss", [1, 2, 3], [3.0, 2.0, 1.0])], x="epoch", y="y").figure.axes[0]
    assert all(tick == round(tick) for tick in axes.get_xticks())


def heated(matrix, names, **options):
    return heat("h", matrix, rows=names, columns=names, x="x", y="y", tips={}, **options)


def test_a_dense_matrix_names_its_columns_on_top():
    names = [f"class {i}" for i in range(30)]
    axes = heated(np.eye(30) * 100, names).figure.axes[0]
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
    band = ([88.0, None, 69.0], [92.0, None, 71.0])
    plot = lines("p", [Curve("one", [4, 6, 8], [90.0, None, 70.0], *band)], x="x", y="y")
    tips = ["one\nx 4: 90.00 % (88.00 to 92.00)", "one\nx 8: 70.00 % (69.00 to 71.00)"]
    assert plot.tips == {"line-0": tips}
    root = ElementTree.fromstring(plot.inline("f"))
    assert len(root.findall(".//*[@id='f-line-0']//use")) == 2


def test_heat_is_opacity_and_nothing_where_nothing_is_known():
    def opacity(matrix, root):
        plot = heated(np.array(matrix), [str(i) for i in range(len(matrix))], root=root)
        return plot.figure.axes[0].images[0].get_array()[..., 3].tolist()

    assert opacity([[100.0, np.nan], [0.0, 25.0]], root=False) == [[217, 0], [0, 54]]
    assert opacity([[25.0]], root=True) == [[108]]


def test_figures_are_files_for_papers(runs, tmp_path):
    paths = plots.write_figures(read_settings([runs / "none"]), tmp_path)
    names = {path.name for path in paths}
    stems = {"accuracy", "forgetting", "training"}
    stems |= {f"{k}-{c}" for k in ("groups", "confusion") for c in ("cnn", "ame", "ncm")}
    assert names == {f"{stem}.{kind}" for stem in stems for kind in ("svg", "pdf")}
    for path in paths:
        assert path.read_bytes().startswith(b"%PDF" if path.suffix == ".pdf" else b"<?xml")


def test_equal_figures_are_equal_bytes(runs, tmp_path):
    settings = read_settings([runs / "geo-1", runs / "geo-2"])
    one, two = (
        [path.read_bytes() for path in plots.similarity(settings)[0].files(tmp_path)]
        for _ in range(2)
    )
    assert one == two


def test_evil_names_in_tables_and_figures(runs, tmp_path):
    table = Table(["class"], [[name] for name in EVIL])
    assert len(table.markdown().splitlines()) == len(EVIL) + 2
    assert len(table.latex().splitlines()) == len(EVIL) + 6
    plot = lines("p", [Curve(name, [1, 2], [3.0, 4.0]) for name in (*EVIL, "小猫")], x="x", y="y")
    assert all(path.stat().st_size > 1000 for path in plot.files(tmp_path))
    written = "".join(ElementTree.fromstring(plot.inline("f")).itertext())
    assert all(printable(name) in written for name in EVIL)
