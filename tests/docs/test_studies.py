"""Studies and benchmarks: all have help, variants train, mapped features are right, choices use held-out images."""

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from studies import gain, moving, reading
from studies.base import VARIANTS, Distilled, variant
from studies.drift import moved
from tests.helpers import tiny

from geodl import ClassIncremental, Learner
from geodl.closed_form.primal import Statistics
from geodl.core.events import EpochEnded
from geodl.methods import METHODS


@pytest.mark.parametrize("name", [*VARIANTS, "rotations+nesterov"])
def test_every_variant_trains_and_reads_the_later_classes(name):
    kind, options = variant(name)
    data, events = tiny.dataset(), []
    config = tiny.config(method="analytic", exemplars=0, expansion=64, **options)
    learner = Learner(config, listener=events.append)
    learner.method = kind(learner.config)
    plain = Learner(tiny.config(method="analytic", exemplars=0, expansion=64))
    plain.learn(data.train.pixels[:18], data.train.labels[:18])
    if kind is Distilled:
        learner.method.teachers = [plain.network]
    learner.learn(data.train.pixels[:18], data.train.labels[:18])
    learner.learn(data.train.pixels[18:], data.train.labels[18:])
    epochs = [event for event in events if isinstance(event, EpochEnded)]
    assert [event.epoch for event in epochs] == [1, 2]
    own = {"distilled": {"distill"}, "decorrelation": {"decorrelation"}}.get(name, set())
    assert set(epochs[0].parts) == {"ce"} | own
    assert all(torch.isfinite(p).all() for p in learner.network.parameters())
    assert learner.evaluate(data.test.pixels, data.test.labels)["analytic"].accuracy > 50
    both = (each.network.backbone.parameters() for each in (plain, learner))
    assert (name == "plain") == all(torch.equal(a, b) for a, b in zip(*both, strict=True))


ROOT = Path(__file__).parents[2]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in ("studies", "benchmarks")
    for path in (ROOT / folder).glob("[a-z]*.py")
)


@pytest.mark.parametrize("name", MODULES)
def test_every_study_and_benchmark_has_help(name, monkeypatch, capsys):
    known = set(METHODS)
    module = import_module(name)
    for own in set(METHODS) - known:  # a study's method is not for other tests
        METHODS.remove(own)
    if not hasattr(module, "main"):
        return
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as left:
        module.main()
    assert left.value.code == 0
    assert "usage" in capsys.readouterr().out


@pytest.mark.parametrize("images", [30, 60])
def test_old_features_are_mapped_by_the_affine_map_of_the_current_images(images):
    rng = np.random.default_rng(images)
    before, after, z, expected = {}, {}, {}, {}
    for name, width in {"shallow": 3, "deep": 5}.items():
        weight, shift = rng.normal(size=(width, width)), rng.normal(size=width)
        before[name] = torch.tensor(rng.normal(size=(images, width)))
        after[name] = before[name] @ torch.tensor(weight) + torch.tensor(shift)
        z[name] = torch.tensor(rng.normal(size=(7, width)))
        expected[name] = z[name].numpy() @ weight + shift
    for name, block in moved(z, before, after).items():
        size = max(np.abs(expected[name]).max(), 1)
        np.testing.assert_allclose(block, expected[name], rtol=0, atol=2e-3 * size)


def test_directions_without_variance_are_shifted_by_the_mean():
    before, after = torch.ones(4, 3), torch.full((4, 3), 3.0)
    z = torch.arange(15.0).reshape(5, 3)
    torch.testing.assert_close(moved({"z": z}, {"z": before}, {"z": after})["z"], z + 2)


def test_the_closed_form_over_a_moving_network(monkeypatch):
    monkeypatch.setattr(moving, "WIDTH", 64)
    scenario = ClassIncremental(tiny.dataset(), base=2, phases=2)
    base = Learner(tiny.config(method="analytic", expansion=64))
    base.learn(scenario.train(0))
    small = {"network": "convnet", "epochs": 1, "batch_size": 8, "scale": 5.0, "precision": "32"}
    found, oracle = moving.study(base.known, scenario, **small)
    assert [len(each.accuracy) for each in found.values()] == [3, 3, 3]
    first = [each.accuracy[0] for each in found.values()]
    assert first[0] == first[1] == first[2] > 50, "all start from the same network"
    assert min(each.accuracy[-1] for each in found.values()) > 30
    assert oracle.accuracy > 50


def test_gain_chooses_by_held_out_images_and_pairs_by_seed(tmp_path, monkeypatch, capsys):
    asked = []

    def run(out, **options):
        """Make GeoDL 3 without margin and cosine 10 on the grid best; on test images GeoDL is ahead by the seed."""
        asked.append(options)
        best = options.get("geodesic_weight") == 3 or options.get("cosine_weight") == 10
        plain = options.get("margin_weight") == 0 or options.get("cosine_features") == "grid"
        held_out = {name: figures(10 * best + plain) for name in ("nme", "cnn", "ncm")}
        test = figures(20 + (options["seed"] if options["distill"] == "geodesic" else 0))
        results = dict.fromkeys(("nme", "cnn", "ncm", "ame"), test)
        return SimpleNamespace(held_out=held_out if "hold_out" in options else {}, results=results)

    def figures(value):
        return SimpleNamespace(to_dict=lambda: dict.fromkeys(KEPT, value))

    monkeypatch.setattr(gain.geodl, "run", run)
    study = gain.Study(None, tmp_path)
    study.compare(3)
    chosen = [each for each in asked if "hold_out" in each]
    assert [each["phases"] for each in chosen] == [10] * 17 + [25] * 4
    best = {side: [name for name, _ in study.ranked(side, 25)] for side in gain.SIDES}
    assert best["GeoDL"] == ["GeoDL 3, no margin", "GeoDL 3"]
    assert best["cosine"][0] in ("cosine 10, grid", "cosine 10, grid, no margin")
    compared = asked[len(chosen) :]
    assert [(each["method"], each["phases"], each["seed"]) for each in compared[:6:2]] == [
        ("lucir", 10, k) for k in (1, 2, 3)
    ]
    assert all(each["geodesic_weight"] == 3 for each in compared if each["distill"] == "geodesic")
    assert not any("margin_weight" in each for each in compared if each["method"] == "finetune")
    assert list(study.gain("LUCIR", 10, "nme").values) == [1, 2, 3]
    asked.clear()
    study.compare(3)
    assert asked == []
    gain.tables(study, tmp_path / "figures")
    assert "| LUCIR | 10 | 3 | +2.00 (-0.48 to +4.48)" in capsys.readouterr().out
    assert (tmp_path / "figures" / "gain.svg").exists()


KEPT = ("average", "average_incremental", "final", "forgetting", "accuracy")


def test_an_intercept_equals_centered_ridge_regression_for_any_targets():
    rng = torch.Generator().manual_seed(0)
    h, test = (torch.rand(count, 6, generator=rng, dtype=torch.float64) for count in (90, 20))
    labels = torch.randint(0, reading.CLASSES, (90,), generator=rng)
    statistics = Statistics.empty(6, reading.CLASSES)
    statistics.add(h, labels, reading.CLASSES)
    split = SimpleNamespace(
        aside=lambda view: test.float(), statistics=lambda *_: (lambda z: z, statistics)
    )
    targets = 3 * torch.nn.functional.one_hot(labels, reading.CLASSES).double() - 2
    centered = h - h.mean(0)
    ridge = 0.01 * centered.square().sum() / 6 * torch.eye(6)
    weights = torch.linalg.solve(
        centered.T @ centered + ridge, centered.T @ (targets - targets.mean(0))
    )
    expected = (test - h.mean(0)) @ weights + targets.mean(0)
    found = reading.Reading(intercept=True, tested=reading.ONE).scores(split)
    torch.testing.assert_close(3 * found.double() - 2, expected, rtol=1e-4, atol=1e-4)
    plain = torch.linalg.solve(h.T @ h + 0.01 * h.square().sum() / 6 * torch.eye(6), h.T @ targets)
    found = reading.Reading(targets=(1, -2), tested=reading.ONE).scores(split)
    torch.testing.assert_close(found.double(), test @ plain, rtol=1e-4, atol=1e-4)


def test_shifted_pixels_equal_a_roll_with_a_black_border():
    pixels = torch.arange(1, 26, dtype=torch.uint8).reshape(1, 1, 5, 5).expand(2, 3, 5, 5)
    for down, right in ((0, 0), (2, -1), (-2, 2)):
        found = reading.shifted(pixels, down, right)
        rolled = pixels.roll((down, right), (2, 3))
        known = reading.shifted(torch.ones_like(pixels), down, right) == 1
        assert torch.equal(found[known], rolled[known])
        assert known.sum() == 6 * (5 - abs(down)) * (5 - abs(right))
        assert not found[~known].any()
