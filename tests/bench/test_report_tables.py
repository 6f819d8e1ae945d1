"""Tables of a report, and its comparison with published numbers."""

import csv
import io
import shutil
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.directories import cut

from geodl.bench.report.published import numbers
from geodl.bench.report.results import Estimate, read_run, read_settings
from geodl.bench.report.tables import (
    Points,
    Table,
    compare,
    comparison_table,
    comparisons,
    summary,
    write_tables,
)

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
    words = [f"\\text{name}{{}}" for name in ("backslash", "asciitilde", "asciicircum")]
    for word in (*words, *(f"\\{c}" for c in "&%$#_{}")):
        line = line.replace(word, "")
    assert set(line) <= set("ab")


def test_the_summary_marks_ame_as_an_oracle(runs):
    table = summary(read_settings([runs / "geo-1", runs / "none"]))
    names = ["CNN", "k-NME", "AME (oracle)", "NCM (SDC)", "CNN", "AME (oracle)", "NCM (SDC)"]
    assert [row[1] for row in table.rows] == names
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
            assert each.values["average 1..T"].mean == ours["average"]
        else:
            assert each.difference == pytest.approx(ours["forgetting"] - 18.70)
    own = next(n for n in numbers() if n.row == "LUCIR + GeoDL" and n.dataset == "cifar100")
    assert [each.against for each in compare(own, setting)] == ["average 1..T"] * 3
    table = comparison_table(found)
    assert [row[5] for row in table.rows] == ["CNN", "k-NME", "AME (oracle)"] * 2
    assert any("does not say under which classifier" in words for words in table.notes)


def test_two_settings_beside_one_number_are_told_apart(runs):
    one = read_settings([runs / "cifar"])[0]
    two = comparison_table(comparisons([one, replace(one, label="another")]))
    assert two.header[2:4] == ["method", "setting"]
    assert {row[3] for row in two.rows} == {"LUCIR", "another"}
    assert "setting" not in comparison_table(comparisons([one])).header


def test_a_number_without_a_run_stands_alone():
    number = numbers()[0]
    (row,) = comparison_table(compare(number, None)).rows
    ours = [None] * 3
    assert row[:6] == ["Table 1", "CIFAR-100", "LwF", 5, 20, "CNN"]
    assert row[6:] == [*ours, 49.59, "average 0..T", None]


def test_incomplete_runs_are_not_compared(runs, tmp_path):
    shutil.copytree(runs / "cifar", tmp_path / "cifar")
    cut(tmp_path / "cifar", 5)
    assert comparisons(read_settings([tmp_path / "cifar"])) == []


def test_tables_are_written_in_every_format(runs, tmp_path):
    paths = write_tables(read_settings([runs / "cifar"]), tmp_path / "tables")
    names, kinds = ("published", "results"), ("csv", "md", "tex")
    assert sorted(path.name for path in paths) == [f"{n}.{kind}" for n in names for kind in kinds]
    assert "63.17" in (tmp_path / "tables" / "published.md").read_text()
