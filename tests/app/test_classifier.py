"""The practitioner's classifier: learning in steps, known and new classes, and what it keeps."""

import shutil

import pytest
import torch
from tests.helpers.directories import contents, saved
from tests.helpers.folders import QUICK, Heard, exemplars_of, rows_of, write_digits

import geodl
from geodl.app import state
from geodl.app.classifier import IncrementalClassifier
from geodl.bench.report.results import read_run, read_settings
from geodl.cli.report import render
from geodl.core.events import OptionsChosen
from geodl.learning import algorithm
from geodl.store import Directory


@pytest.fixture
def trained(monkeypatch):
    """Record the phases that are trained: their images and the exemplars beside them."""
    phases = []
    begin = algorithm.begin

    def spy(*arguments):
        phases.append(begin(*arguments))
        return phases[-1]

    monkeypatch.setattr(algorithm, "begin", spy)
    return phases


def test_two_steps_are_learned_and_recognized(classifier, weeks, tmp_path, digits):
    before = contents(weeks[0])
    first = classifier.learn(weeks[0], threads=1, epochs=20)
    assert (first.step, first.new, first.returning) == (1, ("digit 0", "digit 1"), ())
    second = classifier.learn(weeks[1], threads=1, epochs=20)
    assert (second.step, second.classes) == (2, ("digit 0", "digit 1", "digit 2", "digit 3"))
    assert classifier.classes == second.classes
    test = write_digits(tmp_path / "test", digits, range(4), 30, start=100)
    found = classifier.evaluate(test)
    assert found.images == 120
    assert found.accuracy > 75  # chance is 25, forgetting the first step leaves at most 50
    assert found.per_step[1] > 60
    counts = found.confusion.counts
    assert counts.sum(dim=1).tolist() == [30] * 4
    assert found.accuracy == pytest.approx(100 * counts.diagonal().sum().item() / 120)
    assert found.confusion.classes == classifier.classes
    assert found.accuracy == pytest.approx((found.per_step[1] + found.per_step[2]) / 2)
    assert contents(weeks[0]) == before


def test_the_same_images_are_not_learned_twice(taught, weeks, trained, tmp_path):
    before = contents(taught.path)
    again = taught.learn(weeks[0], **QUICK)
    assert again.already
    assert again.accuracy is not None
    # contents count, names of folders above the classes do not
    weeks[0].rename(tmp_path / "other name")
    assert taught.learn(tmp_path / "other name", **QUICK).already
    assert contents(taught.path) == before
    assert len(trained) == 0
    assert not taught.learn(tmp_path / "other name", again=True, **QUICK).already
    assert len(trained) == 1


def test_validation_images_are_never_trained_on(classifier, weeks, trained):
    classifier.learn(weeks[0], **QUICK)
    classifier.learn(weeks[0], again=True, **QUICK)
    classifier.learn(weeks[1], **QUICK)
    checks = set(state.load(Directory(classifier.path)).validation.item_digests())
    assert len(checks) == 4 * 3  # a fifth of 15
    assert len(trained) == 3
    for phase in trained:
        assert not checks & set(phase.training_images.item_digests())
    # learned again, a picture is in the step or in the memory, not in both
    remembered = getattr(trained[1].memory.images, "item_digests", list)()
    assert not set(trained[1].images.item_digests()) & set(remembered)


def test_more_images_of_a_known_class(taught, weeks, tmp_path, digits, trained):
    taught.learn(weeks[1], exemplars=5, **QUICK)
    before = state.load(Directory(taught.path))
    more = write_digits(tmp_path / "more", digits, (1,), 30, start=50)
    result = taught.learn(more, exemplars=5, **QUICK)
    assert (result.new, result.returning) == ((), ("digit 1",))
    after = state.load(Directory(taught.path))
    rows = (before.model.network.head.rows() != after.model.network.head.rows()).any(dim=1)
    assert rows.tolist() == [False, True, False, False]  # only its row is trained
    assert [known.images for known in after.classes] == [15, 45, 15, 15]
    assert after.model.memory.per_class() == {0: 5, 1: 5, 2: 5, 3: 5}
    # chosen from old exemplars and new images together
    old, kept = (set(exemplars_of(each, 1).item_digests()) for each in (before, after))
    assert kept <= old | set(trained[-1].images.item_digests())
    assert torch.bincount(after.validation.labels).tolist() == [3, 9, 3, 3]
    mixed = write_digits(tmp_path / "mixed", digits, (1, 5), 12, start=90)
    result = taught.learn(mixed, **QUICK)
    assert (result.new, result.returning) == (("digit 5",), ("digit 1",))


def test_new_names_that_are_easily_mistaken_are_told(classifier, digits):
    names = [f"digit {int(label)}" for label in digits.train.labels[:20]]
    classifier.learn(digits.train.pixels[:20], names, **QUICK)
    other = {"digit 0": "unknown", "digit 1": "Digit 1"}
    names = [other.get(name, name) for name in names]
    told = dict(classifier.learn(digits.train.pixels[20:40], names, **QUICK).skipped)
    assert "a new class, although the model knows 'digit 1'" in told["Digit 1"]
    assert "label of images unlike all classes" in told["unknown"]


def test_without_exemplars_no_image_is_kept(classifier, weeks):
    result = classifier.learn(weeks[0], exemplars=0, **QUICK)
    assert (result.stored_images, result.stored_bytes) == (0, 0)
    assert result.accuracy is not None  # measured while the images were there
    second = classifier.learn(weeks[1], **QUICK)  # the choice stays
    assert second.stored_images == 0
    assert second.per_class["digit 0"] is None
    assert any("No images are kept" in sentence for sentence in second.warnings)
    assert classifier.info()["stored"] == []
    assert not [name for name in saved(Directory(classifier.path), 1).memory if "pixels" in name]
    classifier.learn(weeks[1], again=True, **QUICK | {"exemplars": 5})
    # classes without exemplars are represented by their class means
    now = state.load(Directory(classifier.path)).model
    assert now.memory.per_class() == {2: 5, 3: 5}
    nme, ncm = (now.classifiers[name].means for name in ("nme", "ncm"))
    assert torch.equal(nme[:2], ncm[:2])
    assert not torch.equal(nme[2:], ncm[2:])
    assert (classifier.predict(weeks[0], classifier="nme").probabilities > 0).all()


def test_the_budget_is_kept_and_stated(classifier, weeks):
    chosen = Heard(OptionsChosen)
    result = classifier.learn(weeks[0], exemplars=4, listener=chosen, **QUICK)
    assert result.stored_images == 2 * (4 + 3)
    assert result.stored_bytes == 14 * 3 * 8 * 8
    why = {option: reason for event in chosen for option, _, reason in event.choices}
    assert "at most 28 images, 5.4 kB for 2 classes" in why["--exemplars"]
    stored = classifier.info()["stored"]
    assert sum(entry["use"] == "validation" for entry in stored) == 6
    assert all((weeks[0] / entry["from"]).exists() for entry in stored)
    assert all(entry["from"].startswith(f"{entry['class']}/") for entry in stored)


def test_a_total_budget_is_shared(classifier, weeks):
    classifier.learn(weeks[0], exemplars=8, memory_budget="total", **QUICK)
    shutil.rmtree(weeks[0])  # the originals are not needed any more
    classifier.learn(weeks[1], **QUICK)
    kept = state.load(Directory(classifier.path)).model.memory.per_class()
    assert kept == dict.fromkeys(range(4), 2)


def test_a_model_has_a_report_on_its_validation_images(taught, weeks, tmp_path, digits):
    taught.learn(weeks[1], **QUICK)
    more = write_digits(tmp_path / "more", digits, (1,), 8, start=40)
    taught.learn(more, **QUICK)  # no class of its own
    taught.rename("digit 3", "<three>")
    run, info = read_run(taught.path), taught.info()
    assert run.groups == [["digit 0", "digit 1"], ["digit 2", "<three>"]]
    accuracy = run.results["nme"]["accuracy"]
    assert accuracy[-1] == pytest.approx(info["accuracy"])
    assert accuracy[0] == pytest.approx(info["steps"][0]["accuracy"])
    assert run.command() is None
    assert "average 1..T" in render(read_settings([taught.path]))
    taught.remove("digit 0")
    assert read_run(taught.path).groups == [["digit 1", "digit 2", "<three>"]]
    after = render(read_settings([taught.path]))
    assert "digit 0 removed" in after
    assert "average 1..T" not in after  # one group is left


@pytest.mark.slow
def test_digits_reach_ninety_percent(classifier, tmp_path, digits):
    """60 images a class, 5 + 5 classes, no option set: at least 90 % on all ten after the second step."""
    for number, classes in enumerate((range(5), range(5, 10))):
        classifier.learn(write_digits(tmp_path / f"week{number}", digits, classes, 60))
    names = [f"digit {label}" for label in digits.test.labels.tolist()]
    assert classifier.evaluate(digits.test.pixels, names).accuracy >= 90


@pytest.mark.slow
def test_old_classes_are_remembered_far_better_than_by_fine_tuning(tmp_path, cifar100_dir):
    """CIFAR-100, 10 + 10 classes of 200 PNG files: old classes at least 1.5 x as well as by plain fine-tuning.

    Fine-tuning (LUCIR without distillation and margin) starts from the same first step, sees the same exemplars once more, and
    predicts by its head: without the exemplars it would keep nothing at all.
    """
    data = geodl.data.load("cifar100", cifar100_dir)
    for label in range(20):
        folder = tmp_path / ("week1" if label < 10 else "week2") / data.classes[label]
        folder.mkdir(parents=True)
        for i in rows_of(data.train, label, 200):
            data.train.decode(i).save(folder / f"{i}.png")
    test = data.test.select(data.test.labels < 20)
    names = [data.classes[label] for label in test.labels.tolist()]
    ours = IncrementalClassifier(tmp_path / "ours")
    ours.learn(tmp_path / "week1", method="lucir")
    plain = IncrementalClassifier(tmp_path / "plain")
    shutil.copytree(ours.path, plain.path)  # both start from the same first step
    ours.learn(tmp_path / "week2")
    plain.learn(tmp_path / "week2", distill="none", margin_weight=0.0, exemplars=0)
    kept = ours.evaluate(test.pixels, names).per_step[1]
    assert kept >= 1.5 * plain.evaluate(test.pixels, names, classifier="cnn").per_step[1]
