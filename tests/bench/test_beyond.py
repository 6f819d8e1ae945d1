"""The closed form over given weights: equal to runs of the method, reading each image once; the table with published numbers."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers import tiny
from tests.helpers.command import geodl

from geodl.bench.experiment import results_of, run_config
from geodl.bench.paper.beyond import (
    ONE,
    PAIR,
    READINGS,
    Reading,
    beyond,
    beyond_config,
    headline,
    shifted,
)
from geodl.cli import reproduce
from geodl.core.events import FeaturesTaken
from geodl.learning.learner import Learner
from geodl.nets import build_network

OPTIONS = {"method": "analytic", "exemplars": 0, "expansion": 64}


def weights(tmp_path, network="convnet"):
    path = tmp_path / "base.safetensors"
    tensors = build_network(network, 2, head="cosine", seed=3).backbone.state_dict()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


@pytest.mark.parametrize("mirrored", [False, True])
def test_it_equals_runs_of_the_method_and_reads_each_image_once(tmp_path, mirrored):
    data = tiny.dataset(classes=8)
    options = OPTIONS | {"weights": weights(tmp_path), "base": 2, "flip": True}
    options |= {"mirror_training": mirrored}
    heard: list[FeaturesTaken] = []

    def listen(event):
        if isinstance(event, FeaturesTaken) and event.done == event.total:
            heard.append(event)

    readings = {"analytic": Reading((PAIR if mirrored else ONE,), PAIR)}
    found = beyond(tiny.config(**options), data, (2, 6), readings, listen)
    # Each image once, and its mirrored copy if it is fitted or tested.
    expected = (1 + mirrored) * len(data.train) + 2 * len(data.test)
    assert sum(event.total for event in heard) == expected
    for t in (2, 6):
        store = run_config(tiny.config(**options, phases=t), out=tmp_path / str(t), data=data)
        assert found[t]["analytic"] == results_of(store)["analytic"].to_dict()


def test_shifted_views_are_fitted_and_averaged_alike(tmp_path):
    data = tiny.dataset(classes=8)
    config = tiny.config(**OPTIONS, weights=weights(tmp_path))
    found = beyond(config, data, (2,), READINGS["mirror,shift"])
    assert list(found[2]) == ["analytic_single", "analytic", "analytic_shifted"]
    still = Reading((ONE * 2,), ONE * 3)  # copies of one view change nothing
    one, many = (
        beyond(config, data, (2,), {"analytic": reading})
        for reading in (Reading((ONE,), ONE), still)
    )
    assert one == many
    pixels = torch.arange(2 * 3 * 4 * 5, dtype=torch.uint8).reshape(2, 3, 4, 5)
    moved = shifted(pixels, 2, -1)
    assert torch.equal(moved[:, :, 2:, :4], pixels[:, :, :2, 1:])
    assert not moved[:, :, :2].any()
    assert not moved[:, :, :, 4].any()


def test_the_table_has_ours_the_papers_and_others(tmp_path):
    config = tiny.config(**OPTIONS, weights=weights(tmp_path))
    found = beyond(config, tiny.dataset(classes=8), (2, 3))
    runs = {t: [results] for t, results in found.items()}
    rows = {(row[0], row[1]): row[2:] for row in headline({5: runs[2], 10: runs[3]}).rows}
    ours = rows["geodl: closed form, with the mirrored view", "average 0..T"]
    assert [cell.mean for cell in ours[:2]] == [
        runs[t][0]["analytic"]["average_incremental"] for t in (2, 3)
    ]
    # First the row with one view, as in all published rows.
    assert next(iter(rows)) == ("geodl: closed form, one view", "average 0..T")
    assert rows["LUCIR + GeoDL (the paper's Table 1)", "average 1..T"][:2] == [65.14, 65.03]
    assert rows["LUCIR (the paper's Table 1)", "average 0..T"][:2] == [63.17, 60.14]
    assert rows["FOSTER", "average 0..T"][:2] == [71.08, 68.61]
    assert not any(name.startswith("DS-AL") for name, _ in rows)  # published for T = 25 alone


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(
        reproduce, "load_data", lambda config: tiny.dataset(classes=100, train=2, test=1, size=32)
    )
    small = lambda file, options: beyond_config(file, {**options, "expansion": 64})  # noqa: E731
    monkeypatch.setattr(reproduce.beyond, "beyond_config", small)
    words = ["--weights", weights(tmp_path, "resnet32"), "--phases", "1", "--threads", "1"]
    said = geodl("reproduce", "beyond", *map(str, words), "--out", str(tmp_path / "out")).stdout
    assert "\n| geodl: closed form, one view |" in said
    assert "LUCIR + GeoDL" in (tmp_path / "out" / "beyond.md").read_text()


@pytest.mark.parametrize(
    "words", [["beyond"], ["beyond", "--weights", "nowhere"], ["table1", "--weights", "some"]]
)
def test_bad_weights_are_one_line(words):
    said = geodl("reproduce", *words, status=2).stderr
    assert "weights" in said
    assert said.count("\n") == 1


def test_options_that_it_does_not_use_are_refused():
    options = "--dry-run --dataset imagenet --length smoke --runs 1 --jobs 2".split()
    said = geodl("reproduce", "beyond", "--weights", "nowhere", *options, status=2).stderr
    assert "not used by `geodl reproduce beyond`" in said
    assert all(option in said for option in options if option.startswith("--"))


BASES = Path(__file__).parents[2] / "results" / "bases"


@pytest.mark.parametrize("file", sorted(BASES.glob("*.safetensors")), ids=lambda file: file.stem)
def test_a_base_that_is_published_is_the_one_described_and_is_read(file):
    lines = (BASES / "README.md").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"| {file.name} |"))
    assert hashlib.sha256(file.read_bytes()).hexdigest() in line
    Learner(beyond_config(file, {})).check()
    assert load_file(file)["head.weight"].shape == (50, 64)
