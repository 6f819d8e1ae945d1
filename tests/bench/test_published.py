"""The published numbers: complete, as printed, and matched to the right runs."""

import re
from collections import Counter
from pathlib import Path

import pytest

from geodl.bench.report.published import departures, matching, not_as_published, numbers, same
from geodl.config import Layer, preset_layer
from geodl.methods import configure

PAPER = Path(__file__).parents[3] / "shared" / "paper" / "geodl-cvpr2021.tex"
RUN = {
    "data": "cifar100",
    "method": "lucir",
    "distill": "geodesic",
    "phases": 5,
    "exemplars": 20,
    "memory_budget": "per_class",
    "order": "lucir-1993",
    "subspace_dim": 127,
}


def found(base=50, **options):
    return {
        (n.table, n.metric, n.row, n.phases, n.memory, n.classifier): n.value
        for n in matching(RUN | options, base)
    }


def test_every_table_is_complete():
    counts = Counter(number.table for number in numbers())
    assert counts == {
        "Table 1": 2 * 3 * 3 * 7,
        "Table 2": 4 * 3 * 5,
        "Table 3": 4,
        "Table 4": 4 * 3 * 5,
        "10-class start": 4,
        "time and memory": 5,
    }
    keys = [tuple(v for k, v in vars(number).items() if k != "value") for number in numbers()]
    assert len(set(keys)) == len(keys)


def _paper_tables():
    """Read the numbers of each data row of each tabular in the paper's source."""
    if not PAPER.exists():
        pytest.skip(f"the paper's source is not at {PAPER}")
    source = PAPER.read_text(encoding="utf-8")
    tables = {}
    for body in re.findall(r"\\begin\{table.*?\\end\{table", source, re.DOTALL):
        label = re.search(r"\\label\{(.*?)\}", body)[1]
        lines = [re.sub(r"\d*\.\d+in|resizebox.*", "", line) for line in body.splitlines()]
        rows = [re.findall(r"(?<![\d.])\d{1,2}\.\d{2}(?!\d)", line) for line in lines]
        tables[label] = [[float(x) for x in row] for row in rows if len(row) >= 4]
    return tables


def _ours(table, metric):
    rows = {}
    for n in numbers():
        if n.table == table and n.metric == metric:
            rows.setdefault((n.row, n.classifier), []).append(n.value)
    return list(rows.values())


@pytest.mark.parametrize(
    ("table", "metric", "label", "rows"),
    [
        # Ours go dataset by dataset, the paper's rows across the datasets.
        ("Table 1", "average", "tab:all_datasets_res", slice(7)),
        ("Table 1", "forgetting", "tab:all_datasets_res", slice(7, None)),
        ("Table 2", "average", "tab:vary_sample", slice(None)),
        ("Table 3", "average", "tab:subspace_dim", slice(None)),
        ("Table 4", "average", "tab:vary_sample_imagenetsubset", slice(None)),
    ],
)
def test_tables_are_as_printed(table, metric, label, rows):
    assert _ours(table, metric) == _paper_tables()[label][rows]


def test_numbers_outside_the_tables():
    start = {(n.row, n.base): n.value for n in numbers() if n.table == "10-class start"}
    assert start == {
        ("CE + GeoDL", 50): 62.8,
        ("CE + GeoDL", 10): 60.5,
        ("CE + Cos", 50): 60.5,
        ("CE + Cos", 10): 57.3,
    }
    cost = [n for n in numbers() if n.table == "time and memory"]
    assert {(n.metric, n.distill, n.against): n.value for n in cost} == {
        ("time_ratio", "geodesic", "lwf"): 1.4,
        ("time_ratio", "geodesic", "cosine"): 1.3,
        ("memory_gb", "geodesic", None): 2.4,
        ("memory_gb", "cosine", None): 2.1,
        ("memory_gb", "lwf", None): 1.7,
    }


def test_only_rows_cited_from_others_count_phase_0_and_some_name_no_classifier():
    cited = {"LwF", "iCaRL", "BiC", "LUCIR", "Mnemonics"}
    for number in numbers():
        expected = number.row in cited if number.metric == "average" else None
        assert number.includes_phase0 is expected, number
        unstated = number.row in {"LUCIR", "Mnemonics", "LUCIR + GeoDL"}
        unstated |= number.table == "time and memory"
        assert (number.classifier is None) == unstated, number
        assert number.classifier in {None, "cnn", "nme", "ame"}


def test_a_run_is_matched_by_its_whole_protocol():
    assert found() == {
        ("Table 1", "average", "LUCIR + GeoDL", 5, 20, None): 65.14,
        ("Table 1", "forgetting", "LUCIR + GeoDL", 5, 20, None): 9.49,
    }
    assert found(phases=25)["Table 1", "average", "LUCIR + GeoDL", 25, 20, None] == 63.12
    imagenet = found(base=500, data="imagenet")
    assert imagenet["Table 1", "average", "LUCIR + GeoDL", 5, 20, None] == 65.23
    for other in (
        {"data": "digits"},
        {"phases": 4},
        {"exemplars": 30},
        {"memory_budget": "total"},
        {"order": "icarl-1993"},
        {"distill": "none"},
        {"subspace_dim": 64},
        {"base": 40},
        {"groups": [50, 25, 25]},  # they hold, whatever the number of phases
    ):
        assert found(**other) == {}


def test_ablations_are_matched_by_memory_and_dimension():
    many = found(method="finetune", distill="geodesic", phases=10, exemplars=60)
    assert set(many.values()) == {66.00, 65.82, 65.92}
    narrow = found(method="finetune", distill="geodesic", phases=10, subspace_dim=16)
    assert narrow == {("Table 3", "average", "CE + GeoDL", 10, 20, "ame"): 61.87}
    small = found(base=10, method="finetune", distill="cosine", phases=10)
    assert small == {("10-class start", "average", "CE + Cos", 10, 20, "ame"): 57.3}
    # The dimension is an option of the geodesic distillation alone.
    assert len(found(method="finetune", distill="cosine", phases=10, subspace_dim=16)) == 4


def test_a_training_with_two_names_has_the_rows_of_both():
    assert same("lwf", "lwf") == same("icarl", "lwf")
    expected = {
        ("Table 1", "average", "LwF", 5, 20, "cnn"): 49.59,
        ("Table 1", "average", "iCaRL", 5, 20, "nme"): 57.12,
        ("Table 1", "forgetting", "LwF", 5, 20, "cnn"): 43.36,
        ("Table 1", "forgetting", "iCaRL", 5, 20, "nme"): 31.88,
    }
    assert found(method="lwf", distill="lwf") == found(method="icarl", distill="lwf") == expected
    both = found(method="finetune", phases=10)
    assert both == found(method="icarl", phases=10)
    assert {(table, row) for table, _, row, *_ in both} == {
        ("Table 1", "iCaRL + GeoDL"),
        ("Table 2", "CE + GeoDL"),
        ("Table 3", "CE + GeoDL"),
        ("10-class start", "CE + GeoDL"),
    }
    # CE + LwF has a cosine head: it is another training than LwF.
    cosine_head = found(method="finetune", distill="lwf", phases=10)
    assert not any(row == "LwF" for _, _, row, *_ in cosine_head)


def trained(preset, **options):
    return configure([preset_layer(preset), Layer("", options)]).config.identity()


@pytest.mark.parametrize("preset", ["cifar100", "imagenet-subset", "imagenet"])
@pytest.mark.parametrize("method", ["lwf", "icarl", "bic", "lucir", "mnemonics", "finetune"])
def test_the_papers_presets_are_trained_as_in_the_paper(preset, method):
    assert not_as_published(trained(preset, method=method)) == []
    other = {"phases": 25, "base": 10, "exemplars": 60, "analysis": False, "seed": 3}
    geodesic = {"distill": "geodesic", "subspace_dim": 16}
    config = trained(preset, method=method, **geodesic, **other)
    assert not_as_published(config | {"fingerprint": "x"}) == []


def test_departures_from_the_papers_training_are_named():
    assert not_as_published(trained("cifar100-cpu", method="lucir")) == [
        "scale 10.0 instead of 1.0",
        "epochs 6 instead of 160",
        "base_epochs 16 instead of 160",
        "lr 0.05 instead of 0.1",
        "base_lr 0.2 instead of 0.1",
        "schedule onecycle instead of step",
        "ame_images 150",
    ]
    bic = not_as_published(trained("cifar100-cpu", method="bic"))
    assert "epochs 6 instead of 250" in bic
    assert not any(words.startswith("milestones") for words in bic)  # one cycle has none
    for options, words in (
        ({"method": "lucir", "base_epochs": 160, "base_lr": 0.1}, []),
        ({"method": "lucir", "epochs": 6}, ["epochs 6 instead of 160"]),
        ({"method": "icarl", "sigmoid": True}, ["sigmoid True instead of False"]),
    ):
        assert not_as_published(trained("cifar100", **options)) == words
    short = trained("cifar100-cpu", method="lucir") | {"base_epochs": None}
    assert departures(short, "cifar100-cpu") == ["base_epochs 6 instead of 16"]
