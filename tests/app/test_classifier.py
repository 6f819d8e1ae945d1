"""The practitioner's classifier: learning in steps, coming back, going on after a stop, and what it keeps."""

import hashlib
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from tests.helpers.directories import FILES, make_model, saved
from torch import nn

import geodl
from geodl.app import before, choices, preparing, state
from geodl.app.advice import at_end_of_step as advise
from geodl.app.choices import checked, choose_start, stands_still, training_asked
from geodl.app.classifier import IncrementalClassifier
from geodl.app.state import KnownClass
from geodl.bench.report.results import read_run, read_settings
from geodl.cli.report import render, report
from geodl.config import Layer, RunConfig
from geodl.core.errors import (
    ConfigError,
    DataError,
    GeodlError,
    Interrupted,
    MissingExtraError,
    StoreError,
    TrainingError,
    install,
)
from geodl.core.events import (
    Advised,
    EpochEnded,
    OptionsChosen,
    StepContinued,
    StepTaken,
    TimeEstimated,
)
from geodl.core.text import readable
from geodl.data import Dataset, squares
from geodl.data import intake as intakes
from geodl.learning import algorithm
from geodl.learning.learner import Learner
from geodl.methods import configure
from geodl.model.metrics import Confusion
from geodl.store import Directory

QUICK = {"epochs": 3, "threads": 1, "workers": 1, "precision": "32"}


def write_digits(root: Path, digits: Dataset, classes, count: int, start: int = 0) -> Path:
    for label in classes:
        for i in (digits.train.labels == label).nonzero().flatten()[start : start + count].tolist():
            path = root / f"digit {label}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            digits.train.decode(i).save(path)
    return root


def files(root: Path) -> dict[str, str]:
    """Hash every file, without those that tell times, locks and unfinished work."""
    paths = (path for path in sorted(root.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
        if path.name not in ("events.jsonl", "lock") and path.parent.name != "progress"
    }


@pytest.fixture
def weeks(tmp_path, digits):
    one = write_digits(tmp_path / "week1", digits, (0, 1), 15)
    two = write_digits(tmp_path / "week2", digits, (2, 3), 15)
    return one, two


@pytest.fixture
def model(tmp_path):
    return IncrementalClassifier(tmp_path / "model")


@pytest.fixture
def trained(monkeypatch):
    """Record the phases that are trained: their images and the exemplars beside them."""
    phases = []
    begin = algorithm.begin

    def spy(*arguments):
        phase, classes = begin(*arguments)
        phases.append(phase)
        return phase, classes

    monkeypatch.setattr(algorithm, "begin", spy)
    return phases


class Heard(list):
    """A listener that keeps the events of one kind."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def __call__(self, event):
        if isinstance(event, self.kind):
            self.append(event)


# ------------------------------------------------------------------------------------------------------------ learning


def test_two_steps_are_learned_and_recognized(model, weeks, tmp_path, digits):
    before = files(weeks[0])
    first = model.learn(weeks[0], threads=1, epochs=20)
    assert (first.step, first.new, first.returning) == (1, ("digit 0", "digit 1"), ())
    second = model.learn(weeks[1], threads=1, epochs=20)
    assert (second.step, second.classes) == (2, ("digit 0", "digit 1", "digit 2", "digit 3"))
    assert model.classes == second.classes
    test = write_digits(tmp_path / "test", digits, range(4), 30, start=100)
    found = model.evaluate(test)
    assert found.images == 120
    assert found.accuracy > 75  # chance is 25, forgetting the first step leaves at most 50
    assert found.per_step[1] > 60
    counts = found.confusion.counts
    assert counts.sum(dim=1).tolist() == [30] * 4
    assert found.accuracy == pytest.approx(100 * counts.diagonal().sum().item() / 120)
    assert found.confusion.classes == model.classes
    assert found.accuracy == pytest.approx((found.per_step[1] + found.per_step[2]) / 2)
    assert files(weeks[0]) == before


def test_the_public_name():
    assert geodl.IncrementalClassifier is IncrementalClassifier


def test_the_same_images_are_not_learned_twice(model, weeks, trained, tmp_path):
    model.learn(weeks[0], **QUICK)
    before = files(model.path)
    again = model.learn(weeks[0], **QUICK)
    assert again.already
    assert again.accuracy is not None
    weeks[0].rename(
        tmp_path / "other name"
    )  # contents count, names of folders above the classes do not
    assert model.learn(tmp_path / "other name", **QUICK).already
    assert files(model.path) == before
    assert len(trained) == 1
    assert not model.learn(tmp_path / "other name", again=True, **QUICK).already
    assert len(trained) == 2


def test_validation_images_are_never_trained_on(model, weeks, trained):
    model.learn(weeks[0], **QUICK)
    model.learn(weeks[0], again=True, **QUICK)
    model.learn(weeks[1], **QUICK)
    checks = set(state.load(Directory(model.path)).validation.item_digests())
    assert len(checks) == 4 * 3  # a fifth of 15
    assert len(trained) == 3
    for phase in trained:
        assert not checks & set(phase.training_images.item_digests())
    # learned again, a picture is in the step or in the memory, not in both
    assert not set(trained[1].images.item_digests()) & set(
        getattr(trained[1].memory.images, "item_digests", list)()
    )


def test_more_images_of_a_known_class(model, weeks, tmp_path, digits, trained):
    model.learn(weeks[0], **QUICK)
    model.learn(weeks[1], exemplars=5, **QUICK)
    before = state.load(Directory(model.path))
    more = write_digits(tmp_path / "more", digits, (1,), 30, start=50)
    result = model.learn(more, exemplars=5, **QUICK)
    assert (result.new, result.returning) == ((), ("digit 1",))
    after = state.load(Directory(model.path))
    rows = (before.model.network.head.rows() != after.model.network.head.rows()).any(dim=1)
    assert rows.tolist() == [False, True, False, False]  # only its row is trained
    assert [known.images for known in after.classes] == [15, 45, 15, 15]
    assert after.model.memory.per_class() == {0: 5, 1: 5, 2: 5, 3: 5}
    # chosen anew from old exemplars and new images together
    old = set(
        before.model.memory.images.select(before.model.memory.images.labels == 1).item_digests()
    )
    new = set(trained[-1].images.item_digests())
    assert (
        set(after.model.memory.images.select(after.model.memory.images.labels == 1).item_digests())
        <= old | new
    )
    assert torch.bincount(after.validation.labels).tolist() == [3, 9, 3, 3]


def test_known_and_new_classes_in_one_step(model, weeks, tmp_path, digits):
    model.learn(weeks[0], **QUICK)
    mixed = write_digits(tmp_path / "mixed", digits, (1, 5), 12, start=60)
    result = model.learn(mixed, **QUICK)
    assert (result.new, result.returning) == (("digit 5",), ("digit 1",))
    assert model.classes == ("digit 0", "digit 1", "digit 5")


def test_one_class_alone_is_not_trained(model, tmp_path, digits):
    with pytest.raises(ConfigError, match="two classes"):
        model.learn(write_digits(tmp_path / "a", digits, (7,), 10), **QUICK)
    assert not model.path.exists()


def test_new_names_that_are_easily_mistaken_are_told(model, digits):
    pixels, names = (
        digits.train.pixels[:20],
        [f"digit {int(label)}" for label in digits.train.labels[:20]],
    )
    model.learn(pixels, names, **QUICK)
    names = [
        "unknown" if name == "digit 0" else name.replace("digit 1", "Digit 1") for name in names
    ]
    told = dict(model.learn(digits.train.pixels[20:40], names, **QUICK).skipped)
    assert "a new class, although the model knows 'digit 1'" in told["Digit 1"]
    assert "also said of images unlike all classes" in told["unknown"]


def test_one_image_in_each_class(model, tmp_path, digits):
    result = model.learn(write_digits(tmp_path / "a", digits, (0, 1), 1), **QUICK)
    assert result.accuracy is None
    assert any("digit 0 (1)" in sentence for sentence in result.warnings)
    assert len(model.predict(tmp_path / "a")) == 2


def test_without_exemplars_no_image_is_kept(model, weeks):
    result = model.learn(weeks[0], exemplars=0, **QUICK)
    assert (result.stored_images, result.stored_bytes) == (0, 0)
    assert result.accuracy is not None  # checked while the images were there
    second = model.learn(weeks[1], **QUICK)  # the choice stays
    assert second.stored_images == 0
    assert second.per_class["digit 0"] is None
    assert any("No images are kept" in sentence for sentence in second.warnings)
    assert model.info()["stored"] == []
    assert len(model.predict(weeks[0])) == 30
    pixels = [
        tensor
        for name, tensor in saved(Directory(model.path), 1).memory.items()
        if "pixels" in name
    ]
    assert not pixels


def test_the_budget_is_kept_and_stated(model, weeks):
    chosen = Heard(OptionsChosen)
    result = model.learn(weeks[0], exemplars=4, listener=chosen, **QUICK)
    assert result.stored_images == 2 * (4 + 3)
    assert result.stored_bytes == 14 * 3 * 8 * 8
    why = {option: reason for event in chosen for option, _, reason in event.choices}
    assert "at most 28 images, 5.4 kB for 2 classes" in why["--exemplars"]
    stored = model.info()["stored"]
    assert sum(entry["use"] == "validation" for entry in stored) == 6
    assert all((weeks[0] / entry["from"]).exists() for entry in stored)
    assert all(entry["from"].startswith(f"{entry['class']}/") for entry in stored)


def test_classes_without_exemplars_stand_by_their_class_means(model, weeks):
    model.learn(weeks[0], exemplars=0, **QUICK)
    model.learn(weeks[1], exemplars=5, **QUICK)
    now = state.load(Directory(model.path)).model
    assert now.memory.per_class() == {2: 5, 3: 5}
    nme, ncm = (now.classifiers[name].means for name in ("nme", "ncm"))
    assert torch.equal(nme[:2], ncm[:2])
    assert not torch.equal(nme[2:], ncm[2:])
    assert (
        model.predict(weeks[0], classifier="nme").probabilities > 0
    ).all()  # they can be predicted


def test_a_total_budget_is_shared(model, weeks):
    model.learn(weeks[0], exemplars=8, memory_budget="total", **QUICK)
    model.learn(weeks[1], **QUICK)
    assert state.load(Directory(model.path)).model.memory.per_class() == {
        0: 2,
        1: 2,
        2: 2,
        3: 2,
    }


def test_originals_can_be_deleted(model, weeks):
    model.learn(weeks[0], **QUICK)
    for path in sorted(weeks[0].rglob("*.png")):
        path.unlink()
    assert model.learn(weeks[1], **QUICK).stored_images == 4 * 15


def test_arrays_and_datasets_learn_as_folders_do(tmp_path, weeks, digits):
    folder = IncrementalClassifier(tmp_path / "a")
    folder.learn(weeks[0], **QUICK)
    rows = [
        i
        for label in (0, 1)
        for i in (digits.train.labels == label).nonzero().flatten()[:15].tolist()
    ]
    pixels = digits.train.pixels[rows].permute(0, 2, 3, 1).numpy()
    labels = [f"digit {label}" for label in digits.train.labels[rows].tolist()]
    # the order of the files in a folder is that of their numbers, and so is that of the rows
    arrays = IncrementalClassifier(tmp_path / "b")
    arrays.learn(pixels, labels, **QUICK)

    class Pairs(torch.utils.data.Dataset):
        classes = ("digit 0", "digit 1")

        def __len__(self):
            return len(rows)

        def __getitem__(self, i):
            return digits.train.decode(rows[i]), np.int64(digits.train.labels[rows[i]])

    dataset = IncrementalClassifier(tmp_path / "c")
    dataset.learn(Pairs(), **QUICK)
    several = IncrementalClassifier(tmp_path / "d")
    several.learn(list(pixels), np.array(labels)[:, None], **QUICK)
    states = [state.load(Directory(each.path)) for each in (folder, arrays, dataset, several)]
    for other in states[1:]:
        assert other.names == states[0].names
        assert torch.equal(other.model.network.head.weight, states[0].model.network.head.weight)
        assert torch.equal(
            other.model.classifiers["nme"].means, states[0].model.classifiers["nme"].means
        )
    assert folder.evaluate(pixels, labels).images == 30
    assert [each.label for each in arrays.predict(pixels[:3])] == [
        each.label for each in folder.predict([digits.train.decode(i) for i in rows[:3]])
    ]


def test_pictures_in_memory_are_seen_as_files_are(model, weeks, tmp_path):
    model.learn(weeks[0], **QUICK)
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    for name, picture, options in (
        ("turned.jpg", Image.fromarray(pixels), {"exif": turned}),
        ("printed.jpg", Image.fromarray(pixels).convert("CMYK"), {}),
        ("deep.tif", Image.fromarray(np.float32(pixels[..., 0] / 255)), {}),
    ):
        picture.save(tmp_path / name, **options)
        (file,), (memory,) = (
            model.predict(tmp_path / name),
            model.predict(Image.open(tmp_path / name)),
        )
        assert memory.top == file.top
    sizes = [pixels, pixels[:10], torch.from_numpy(pixels).permute(2, 0, 1)]
    assert len(model.predict(sizes)) == 3
    for one in (pixels, torch.from_numpy(pixels).permute(2, 0, 1)):
        with pytest.raises(DataError, match="may be one color picture or"):
            model.predict(one)


@pytest.mark.parametrize(
    ("source", "labels", "message"),
    [
        (np.zeros((2, 8, 8), np.uint8), [1], "2 images with 1 label given"),
        ([1, 2], None, r"a dataset of \(image, label\) pairs"),
        (7, None, "int given: allowed are a folder"),
        (np.zeros((0, 8, 8), np.uint8), [], "no images given"),
        ("nowhere", None, "nowhere: not a folder"),
        ("nowhere", [1], "labels given with nowhere"),
    ],
)
def test_what_cannot_be_learned_is_named(model, source, labels, message):
    with pytest.raises(DataError, match=message):
        model.learn(source, labels, **QUICK)
    assert not model.path.exists()


def test_the_parts_of_a_dataset_are_not_taken_for_classes(tmp_path, digits):
    for part, start in (("train", 0), ("test", 3)):
        write_digits(tmp_path / "data" / part, digits, range(2), 3, start)
    with pytest.raises(
        DataError, match=r"parts of a dataset, not classes; give one of them, such as .*data/train$"
    ):
        intakes.take(tmp_path / "data")
    assert len(intakes.take(tmp_path / "data" / "train").classes) == 2


def test_a_network_that_does_not_exist_is_named_before_any_image_is_read(model, weeks, tmp_path):
    heard = []
    for options in ({"network": "resnet99"}, {"weights": tmp_path / "nothing.safetensors"}):
        with pytest.raises(GeodlError, match=r"resnet99|nothing\.safetensors"):
            model.learn(weeks[0], listener=heard.append, **QUICK, **options)
    assert heard == []
    assert not model.path.exists()


def test_it_stops_while_images_are_read(model, weeks):
    with pytest.raises(Interrupted, match="stopped while the images were read"):
        model.learn(weeks[0], stop=lambda: True, **QUICK)
    assert model.learn(weeks[0], **QUICK).step == 1


def test_a_step_is_finished_with_the_threads_it_was_begun_with(model, weeks):
    taken, continued, threads = Heard(StepTaken), Heard(StepContinued), set()
    with pytest.raises(Interrupted):
        model.learn(weeks[0], listener=taken, stop=lambda: bool(taken), **QUICK)

    def listener(event):
        continued(event)
        threads.update([torch.get_num_threads()] if isinstance(event, StepTaken) else [])

    model.learn(weeks[0], listener=listener, **QUICK | {"threads": 2})
    assert continued
    assert threads == {1}


def test_a_step_leaves_the_process_with_the_threads_it_had(model, weeks):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    model.learn(weeks[0], **QUICK)
    found = torch.get_num_threads()
    torch.set_num_threads(before)
    assert found == 3


def test_the_estimate_of_the_time_waits_for_the_device(monkeypatch):
    waited, item = [], torch.Tensor.item
    monkeypatch.setattr(
        torch.Tensor, "item", lambda tensor: waited.append(tensor.requires_grad) or item(tensor)
    )
    assert (
        before.step_seconds(
            RunConfig(network="convnet", image_size=8, batch_size=2), images=10, classes=2
        )
        > 0
    )
    assert sum(waited) == 4  # one step to warm up and three


def test_a_model_has_a_report_on_its_validation_images(model, weeks, tmp_path, digits):
    model.learn(weeks[0], **QUICK)
    model.learn(weeks[1], **QUICK)
    model.learn(
        write_digits(tmp_path / "more", digits, (1,), 8, start=40), **QUICK
    )  # no class of its own
    model.rename("digit 3", "<three>")
    found = read_run(model.path)
    assert found.groups == [["digit 0", "digit 1"], ["digit 2", "<three>"]]
    assert found.results["nme"]["accuracy"][-1] == pytest.approx(model.info()["accuracy"])
    assert found.results["nme"]["accuracy"][0] == pytest.approx(
        model.info()["steps"][0]["accuracy"]
    )
    assert found.command() is None
    shown = render(read_settings([model.path]))
    assert "model: 4 classes" in shown
    assert "Learned in 3 steps" in shown
    assert "digit 3 is now called &lt;three&gt;" in shown
    assert "data:image/webp" not in shown  # a person's own pictures
    assert "data:image/webp" in render(read_settings([model.path]), with_images=True)
    model.remove("digit 0")
    assert read_run(model.path).groups == [["digit 1", "digit 2", "<three>"]]
    after = render(read_settings([model.path]))
    assert "digit 0 removed" in after
    assert "average 1..T" in shown
    assert "average 1..T" not in after  # one group is left: no averages, and no words on them


def test_a_run_never_takes_the_place_of_a_model(model, weeks):
    model.learn(weeks[0], **QUICK)
    before = files(model.path)
    for fresh in (False, True):
        with pytest.raises(StoreError, match="is the directory of a model; use another one"):
            Directory.create_or_open(model.path, {"method": "lucir"}, phases=3, fresh=fresh)
    assert files(model.path) == before


def test_files_that_do_not_fit_in_memory_give_the_same_model(tmp_path, weeks, monkeypatch):
    IncrementalClassifier(tmp_path / "a").learn(weeks[0], **QUICK)
    IncrementalClassifier(tmp_path / "a").learn(weeks[1], **QUICK)
    monkeypatch.setattr(squares, "IN_MEMORY", 0)
    IncrementalClassifier(tmp_path / "b").learn(weeks[0], **QUICK)
    IncrementalClassifier(tmp_path / "b").learn(weeks[1], **QUICK)
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_a_thousand_classes(model):
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (1000, 4, 4), np.uint8)
    result = model.learn(
        pixels, [f"class {i}" for i in range(1000)], epochs=1, threads=1, network="convnet"
    )
    assert len(result.classes) == 1000
    assert result.classes[10] == "class 10"
    assert any("and 992 more" in sentence for sentence in result.warnings)
    assert len(model.predict(pixels[:5], top=3)[0].top) == 3


# ----------------------------------------------------------------------------------------- stopping, failing, sharing


def test_stopped_and_continued_it_is_as_if_never_stopped(tmp_path, weeks):
    straight, stopped = (IncrementalClassifier(tmp_path / name) for name in ("a", "b"))
    for each in (straight, stopped):
        each.learn(weeks[0], **QUICK)
    straight.learn(weeks[1], **QUICK)
    before = files(stopped.path)
    for when in (1, 2):
        taken = Heard(StepTaken)
        with pytest.raises(Interrupted):
            stopped.learn(weeks[1], listener=taken, stop=lambda: len(taken) >= when, **QUICK)  # noqa: B023
        assert files(stopped.path) == before
        assert stopped.classes == ("digit 0", "digit 1")
    continued = Heard(StepContinued)
    stopped.learn(weeks[1], listener=continued, **QUICK)
    assert continued
    assert files(stopped.path) == files(straight.path)


def test_a_stop_between_two_epochs_keeps_the_progress(model, weeks):
    model.learn(weeks[0], **QUICK)
    ended, continued = Heard(EpochEnded), Heard(StepContinued)
    with pytest.raises(Interrupted, match="progress is saved"):
        model.learn(weeks[1], listener=ended, stop=lambda: bool(ended), **QUICK)
    model.learn(weeks[1], listener=continued, **QUICK)
    assert continued


def test_unfinished_work_on_other_images_is_not_continued(tmp_path, weeks):
    straight, stopped = (IncrementalClassifier(tmp_path / name) for name in ("a", "b"))
    with pytest.raises(Interrupted):
        stopped.learn(weeks[0], stop=lambda: True, **QUICK)
    stopped.learn(weeks[1], **QUICK)
    straight.learn(weeks[1], **QUICK)
    assert files(stopped.path) == files(straight.path)


def test_a_failed_learn_changes_nothing(model, weeks):
    with pytest.raises(TrainingError, match="not finite"):
        model.learn(weeks[0], lr=1e30, **QUICK)
    assert not model.path.exists()
    model.learn(weeks[0], **QUICK)
    before = files(model.path)
    with pytest.raises(
        TrainingError, match="the loss is not finite in phase 1, stage train, epoch 1"
    ):
        model.learn(weeks[1], lr=1e30, **QUICK)
    assert files(model.path) == before
    assert model.classes == ("digit 0", "digit 1")


def test_others_see_the_old_state_while_one_learns(model, weeks):
    model.learn(weeks[0], **QUICK)
    seen = []

    def hear(event):
        if isinstance(event, EpochEnded):
            other = IncrementalClassifier(model.path)
            seen.append({each.label for each in other.predict(weeks[1])})
            with pytest.raises(StoreError, match="is being written by process"):
                other.learn(weeks[1], **QUICK)
            with pytest.raises(StoreError, match="is being written by process"):
                other.undo()

    model.learn(weeks[1], listener=hear, **QUICK)
    assert len(seen) == 3
    assert all(labels <= {"digit 0", "digit 1"} for labels in seen)
    assert len(model.classes) == 4


def test_model_and_images_stay_apart(weeks, tmp_path):
    for path in (weeks[0], weeks[0] / "model", tmp_path):
        with pytest.raises(ConfigError, match="one is inside the other"):
            IncrementalClassifier(path).learn(weeks[0], **QUICK)


def test_links_that_lead_in_a_circle_are_no_folder(tmp_path, weeks):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(DataError, match="loop"):
        IncrementalClassifier(tmp_path / "model").learn(tmp_path / "loop", **QUICK)
    with pytest.raises(GeodlError, match="loop"):
        IncrementalClassifier(tmp_path / "loop").learn(weeks[0], **QUICK)


def test_other_directories_are_refused(tmp_path, weeks):
    Directory.create_or_open(tmp_path / "run", {"method": "icarl"})
    with pytest.raises(StoreError, match="is the directory of a run, not of a model"):
        IncrementalClassifier(tmp_path / "run").learn(weeks[0], **QUICK)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(StoreError, match="not a geodl directory"):
        IncrementalClassifier(tmp_path / "mine").learn(weeks[0], **QUICK)
    with pytest.raises(StoreError, match="no such model"):
        IncrementalClassifier(tmp_path / "nowhere").predict(weeks[0])


# -------------------------------------------------------------------------------------------- undo, rename, remove


def test_undo_goes_back_exactly(model, weeks):
    model.learn(weeks[0], **QUICK)
    before = Directory(model.path).phase(-1)
    scores = [each.top for each in model.predict(weeks[0], top=2)]
    model.learn(weeks[1], **QUICK)
    assert model.undo()["new"] == ["digit 2", "digit 3"]
    assert Directory(model.path).phase(-1) == before
    assert [each.top for each in model.predict(weeks[0], top=2)] == scores
    model.undo()
    with pytest.raises(StoreError, match="has learned nothing yet"):
        model.predict(weeks[0])
    with pytest.raises(StoreError, match="nothing to undo"):
        model.undo()
    assert not model.learn(weeks[1], **QUICK).already


def test_old_states_are_removed(model, weeks):
    model.learn(weeks[0], **QUICK)
    for number in range(5):
        model.rename("digit 0" if number == 0 else f"zero {number - 1}", f"zero {number}")
    for _ in range(state.UNDO):
        model.undo()
    assert model.classes[0] == "zero 1"
    with pytest.raises(StoreError, match="no longer kept"):
        model.undo()
    assert model.info()["undo"] == 0


def test_rename(model, weeks):
    model.learn(weeks[0], **QUICK)
    model.rename("digit 1", "eins")
    assert model.classes == ("digit 0", "eins")
    assert {each.label for each in model.predict(weeks[0])} <= {"digit 0", "eins"}
    assert model.info()["classes"][1]["name"] == "eins"
    for old, new, message in (
        ("digit 1", "x", "class 'digit 1': the model knows digit 0, eins"),
        ("eins", "digit 0", "class of that name"),
        ("eins", " ", "it is empty"),
        ("eins", ".dot", "no folder of images could have it"),
        ("eins", "a/b", "no folder of images could have it"),
        ("eins", "line\nbreak", "it is not valid text"),
        ("eins", "unknown", "images unlike all classes are called that"),
    ):
        with pytest.raises(GeodlError, match=message):
            model.rename(old, new)
    model.rename("eins", "ne\u0301")  # composed as the names of folders are
    assert model.classes[1] == "n\u00e9"


def test_a_class_of_a_learner_that_was_saved_by_itself_is_renamed(model, digits):
    rows = (digits.train.labels < 2).nonzero().flatten()[:16]
    learner = Learner(method="finetune", network="convnet", epochs=1, threads=1)
    learner.learn(
        digits.train.pixels[rows],
        [f"digit {label}" for label in digits.train.labels[rows].tolist()],
    )
    learner.save(model.path)
    model.rename("digit 1", "eins")
    again = IncrementalClassifier(model.path)
    assert sorted(again.classes) == ["digit 0", "eins"]
    assert again.info()["accuracy"] is None


def test_remove(model, weeks):
    model.learn(weeks[0], **QUICK)
    model.learn(weeks[1], **QUICK)
    before = state.load(Directory(model.path))
    model.remove("digit 1")
    after = state.load(Directory(model.path))
    assert model.classes == ("digit 0", "digit 2", "digit 3")
    rows = [0, 2, 3]
    assert torch.equal(after.model.network.head.weight, before.model.network.head.weight[rows])
    assert torch.equal(
        after.model.classifiers["nme"].means, before.model.classifiers["nme"].means[rows]
    )
    gone = set(
        before.model.memory.images.select(before.model.memory.images.labels == 1).item_digests()
    )
    assert not gone & set(after.model.memory.images.item_digests())
    assert torch.bincount(after.model.memory.images.labels).tolist() == [12, 12, 12]
    assert torch.bincount(after.validation.labels).tolist() == [3, 3, 3]
    assert len(model.info()["stored"]) == 45
    wrong = [entry for entry in before.metrics["confusions"]["nme"] if 1 not in entry[:2]]
    share = sum(c for i, j, c in wrong if i == j) / sum(c for _, _, c in wrong)
    assert model.info()["accuracy"] == pytest.approx(100 * share)
    assert model.undo() == {"action": "remove", "class": "digit 1"}
    assert len(model.classes) == 4
    report([model.path], with_images=True)
    model.remove("digit 1", for_good=True)
    assert not (model.path / "report.html").exists()
    stored = (
        path for path in model.path.rglob("*") if path.is_file() and path.name != "events.jsonl"
    )
    kept = b"".join(path.read_bytes() for path in stored)
    assert b"digit 1/" not in kept
    pixels = before.model.memory.images.select(before.model.memory.images.labels == 1).pixels
    assert not any(image.numpy().tobytes() in kept for image in pixels)
    with pytest.raises(StoreError, match="no longer kept"):
        model.undo()
    model.learn(weeks[0], **QUICK)  # it may come back
    assert model.classes == ("digit 0", "digit 2", "digit 3", "digit 1")


def test_models_of_other_versions_open(model, weeks, tmp_path):
    model.learn(weeks[0], **QUICK)
    now = saved(Directory(model.path), 0)
    config = now.extra["config"] | {"an option of another version": 7}
    other = make_model(tmp_path / "other")
    with other.lock():
        contents = (now.model, now.memory, now.metrics, now.extra | {"config": config})
        other.commit(dict(zip(FILES, contents, strict=True)), {"action": "learn"})
    ours, theirs = (
        IncrementalClassifier(path).predict(weeks[0]) for path in (model.path, other.path)
    )
    assert np.array_equal(ours.probabilities, theirs.probabilities)


def test_the_last_class_stays(model, weeks):
    model.learn(weeks[0], **QUICK)
    model.remove("digit 0")
    with pytest.raises(ConfigError, match="the only class"):
        model.remove("digit 1")
    assert [each.label for each in model.predict(weeks[0])] == ["digit 1"] * 30


# ---------------------------------------------------------------------------------------------------------- prediction


def test_predictions_are_those_of_the_formula(model, weeks, digits):
    model.learn(weeks[0], **QUICK)
    now = state.load(Directory(model.path))
    pixels = digits.train.pixels[:6]
    x = (
        pixels.double() / 255 - torch.tensor(now.transform.mean)[:, None, None].double()
    ) / torch.tensor(now.transform.std)[:, None, None].double()
    network = now.model.network.double().eval()
    with torch.no_grad():
        output = network(x)
    cosines = nn.functional.cosine_similarity(
        output.pooled[:, None], now.model.classifiers["nme"].means.double()[None], dim=2
    )
    for classifier, scores in (("nme", network.head.scale * cosines), ("cnn", output.logits)):
        wanted = scores.softmax(dim=1)
        found = model.predict(pixels, classifier=classifier, top=2)
        for each, row in zip(found, wanted, strict=True):
            assert dict(each.top) == pytest.approx(
                dict(zip(now.names, row.tolist(), strict=True)), abs=1e-5
            )
            assert each.top[0][1] >= each.top[1][1]


def test_class_means_count_mirrored_copies_only_where_pictures_are_mirrored(tmp_path, weeks):
    plain, flipped = (IncrementalClassifier(tmp_path / name) for name in ("a", "b"))
    plain.learn(weeks[0], **QUICK)
    flipped.learn(weeks[0], flip=True, **QUICK)
    for each, mirror in ((plain, False), (flipped, True)):
        now = state.load(Directory(each.path))
        x = now.model.memory.images.pixels.double()
        views = torch.cat([x, x.flip(3)]) if mirror else x
        mean, std = (
            torch.tensor(part)[:, None, None].double()
            for part in (now.transform.mean, now.transform.std)
        )
        with torch.no_grad():
            features = now.model.network.double().features((views / 255 - mean) / std)
        labels = now.model.memory.images.labels.repeat(2 if mirror else 1)
        unit = features / features.norm(dim=1, keepdim=True)
        means = torch.stack([unit[labels == label].mean(dim=0) for label in (0, 1)])
        torch.testing.assert_close(
            now.model.classifiers["nme"].means.double(),
            means / means.norm(dim=1, keepdim=True),
            atol=1e-5,
            rtol=0,
        )


def test_wrong_ways_to_predict_are_named(model, weeks):
    model.learn(weeks[0], **QUICK)
    with pytest.raises(ConfigError, match="top = 0"):
        model.predict(weeks[0], top=0)
    with pytest.raises(ConfigError, match="classifier = 'svm'"):
        model.predict(weeks[0], classifier="svm")
    with pytest.raises(DataError, match="no such file"):
        model.predict("nowhere.png", strict=True)


def test_unknown_classes_are_skipped_in_an_evaluation(model, weeks, tmp_path, digits):
    model.learn(weeks[0], **QUICK)
    found = model.evaluate(write_digits(tmp_path / "test", digits, (1, 9), 5))
    assert found.images == 5
    assert found.skipped == (("digit 9", "the model does not know this class"),)
    assert found.per_class["digit 0"] is None
    with pytest.raises(DataError, match="does not know"):
        model.evaluate(tmp_path / "test", strict=True)
    with pytest.raises(DataError, match="no image of a class that the model knows"):
        model.evaluate(write_digits(tmp_path / "only", digits, (9,), 5))


# ------------------------------------------------------------------------------------------------------------- choices


@pytest.mark.parametrize(
    ("side", "kind", "network", "size"),
    [
        (5, "cpu", "resnet8", 8),
        (8, "cpu", "resnet8", 8),
        (28, "cpu", "resnet20", 28),
        (32, "cpu", "resnet20", 32),
        (3000, "cpu", "resnet20", 64),
        (3000, "cuda", "resnet18", 128),
        (32, "cuda", "resnet32", 32),
    ],
)
def test_networks_are_chosen_by_size_and_device(monkeypatch, side, kind, network, size):
    monkeypatch.setattr(choices, "has_pretrained", lambda: False)
    assert choose_start(side, {}, kind) == {"network": network, "image_size": size}
    assert choose_start(
        side, {"image_size": 48, "network": "convnet", "method": "lucir"}, kind
    ) == {
        "network": "convnet",
        "image_size": 48,
    }
    monkeypatch.setattr(choices, "has_pretrained", lambda: True)
    assert choose_start(side, {"method": "lucir"}, kind) == {"network": network, "image_size": size}


@pytest.mark.parametrize(
    ("side", "size"), [(8, 64), (28, 112), (32, 128), (100, 128), (192, 192), (3000, 224)]
)
def test_with_pretrained_weights_their_features_are_read_in_closed_form(monkeypatch, side, size):
    monkeypatch.setattr(choices, "has_pretrained", lambda: True)
    start = choose_start(side, {}, "cpu")
    assert (start["network"], start["pretrained"], start["method"]) == (
        "efficientnet-lite0",
        True,
        "analytic",
    )
    assert start["image_size"] == size
    assert stands_still(start, {})
    adapted = checked({"adapt": "auto"})
    assert choose_start(side, adapted, "cpu") == start
    assert not stands_still(start, adapted)


def test_before_a_long_training_one_is_asked_and_told_what_would_serve_better(
    model, weeks, monkeypatch
):
    for module in (choices, before):
        monkeypatch.setattr(module, "has_pretrained", lambda: False)
    monkeypatch.setattr(before, "step_seconds", lambda *_, **__: 500.0)
    heard = []
    with pytest.raises(ConfigError, match="not confirmed: nothing was learned"):
        model.learn(weeks[0], listener=heard.append, confirm=lambda seconds: seconds < 500)
    (advised,) = [event.sentence for event in heard if isinstance(event, Advised)]
    assert install("pretrained") in advised
    assert TimeEstimated(500.0) in heard
    assert not [event for event in heard if isinstance(event, StepTaken)]
    assert not model.path.exists()


def test_color_pictures_are_mirrored_and_grey_ones_are_not(tmp_path):
    generator = np.random.default_rng(0)
    grey = generator.integers(0, 256, (8, 8, 8), np.uint8)
    color = generator.integers(0, 256, (8, 8, 8, 3), np.uint8)
    for name, pixels, flip in (("grey", grey, False), ("color", color, True)):
        model = IncrementalClassifier(tmp_path / name)
        model.learn(pixels, [0, 1] * 4, network="convnet", **QUICK)
        transform = state.load(Directory(model.path)).transform
        assert transform.flip is flip
        assert transform.mean == pytest.approx([pixels.mean() / 255] * 3, abs=0.03)


def test_what_a_model_is_made_with_stays(model, weeks):
    model.learn(weeks[0], image_size=12, network="convnet", **QUICK)
    with pytest.raises(ConfigError, match="image_size = 16: this model was made with 12"):
        model.learn(weeks[1], image_size=16, **QUICK)
    model.learn(weeks[1], image_size=12, **QUICK)
    assert state.load(Directory(model.path)).config.network == "convnet"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epoch": 3}, "epoch = 3 .* did you mean epochs?"),
        ({"data_dir": "x"}, "data_dir: not an option of learn"),
        ({"lwf_weight": 2}, "lwf_weight = 2 .* distillation lwf"),
        ({"devices": 2}, "devices: not an option of learn"),
        ({"epochs": 0}, "epochs = 0"),
        ({"epochs": "many"}, "epochs = 'many'"),
        (
            {"method": "bic"},
            "method = 'bic': allowed for your own images are analytic, lucir, finetune",
        ),
        ({"network": "resnet9"}, "network = 'resnet9'"),
    ],
)
def test_impossible_options_are_named(model, weeks, options, message):
    with pytest.raises(ConfigError, match=message):
        model.learn(weeks[0], **options)
    assert not model.path.exists()


def test_options_are_understood_as_written():
    assert checked({"image_size": "32", "flip": None}) == {"image_size": 32}
    assert checked({"epochs": "7", "lr": "0.5"}) == {"epochs": 7, "lr": 0.5}


@pytest.mark.parametrize(
    "option", ["epochs", "jitter", "clip_norm", "distill", "margin", "subspace_dim"]
)
def test_whoever_sets_an_option_of_training_wants_the_network_trained(monkeypatch, option):
    monkeypatch.setattr(choices, "has_pretrained", lambda: True)
    values = {"distill": "cosine"}
    found = checked(
        {"image_size": 16, option: values.get(option, 1 if option != "jitter" else 0.5)}
    )
    assert training_asked(found) == option
    assert choose_start(16, found, "cpu").get("method") is None
    assert (
        training_asked({"gamma": 0.1, "exemplars": 3, "seed": 2, "threads": 1, "flip": False})
        is None
    )
    assert training_asked({"network": "resnet8"}) == "network"
    assert training_asked({"network": "efficientnet-lite0"}) is None


def test_an_option_of_training_keeps_to_the_method_of_the_model(model, weeks):
    model.learn(weeks[0], method="finetune", network="convnet", **QUICK)
    model.learn(weeks[1], epochs=1)
    assert state.load(Directory(model.path)).config.method == "finetune"


def test_a_model_in_closed_form_is_not_trained(model, weeks):
    model.learn(weeks[0], method="analytic", network="convnet", image_size=12)
    with pytest.raises(
        ConfigError, match="epochs: only training uses it, and this model is in closed form"
    ):
        model.learn(weeks[1], epochs=1)
    model.learn(weeks[1], network="convnet")


@pytest.mark.parametrize(
    ("count", "text"), [(999, "999 bytes"), (1500, "1.5 kB"), (2_500_000, "2.5 MB")]
)
def test_bytes_are_written_for_people(count, text):
    assert readable(count) == text


# -------------------------------------------------------------------------------------------------------------- advice


def confusion(*rows):
    return Confusion(torch.tensor(rows), tuple("abcdef"[: len(rows)]))


def known(*images):
    return [KnownClass(name, 1, count) for name, count in zip("abcdef", images, strict=False)]


def test_a_good_model_gets_no_advice():
    assert (
        advise(confusion([9, 1], [0, 10]), known(200, 200), RunConfig(image_size=64), [0, 1]) == []
    )


def test_a_budget_that_leaves_no_class_an_image_is_named():
    config = RunConfig(image_size=64, exemplars=1, memory_budget="total")
    (sentence,) = advise(confusion([9, 1], [0, 10]), known(200, 200), config, [0, 1])
    assert "exemplars = 1, memory_budget = total" in sentence
    (sentence,) = advise(
        confusion([1, 1], [0, 2]), known(200, 200), RunConfig(image_size=64), [0, 1]
    )
    assert sentence.startswith("Weak classes: a (1 of 2 right).")


def test_weak_and_mixed_up_classes_are_named():
    sentences = advise(
        confusion([5, 4, 1], [0, 10, 0], [2, 2, 6]),
        known(200, 200, 200),
        RunConfig(image_size=64),
        [0, 1, 2],
    )
    pairs = ["Look at a and b: 4 of", "Look at c and a: 3 of", "Look at c and b: 2 of"]
    weak = "Weak classes: a (5 of 10 right), c (6 of 10 right)."
    for sentence, begin in zip(sentences, [*pairs, weak], strict=True):
        assert sentence.startswith(begin)


def test_tiny_classes_and_training_from_scratch():
    matrix = confusion([0] * 3, [0] * 3, [0] * 3)
    photos = advise(matrix, known(3, 40, 40), RunConfig(image_size=64), [0, 1, 2])
    assert "Very few images: a (3)" in photos[0]
    assert "About 40 images a class are few" in photos[1]
    assert install("pretrained") in photos[1]
    assert len(advise(matrix, known(3, 40, 40), RunConfig(image_size=8), [0, 1, 2])) == 1
    foreign = RunConfig(image_size=64, network="timm:resnet18", pretrained=True)
    assert len(advise(matrix, known(3, 40, 40), foreign, [0, 1, 2])) == 1
    assert advise(matrix, known(3, 400, 400), RunConfig(image_size=64), [1, 2]) == []


@pytest.mark.parametrize(
    ("adapt", "right", "images", "offered"),
    [
        ("no", 180, 200, True),
        ("auto", 180, 200, False),
        ("no", 199, 200, False),
        ("no", 90, 100, False),
    ],
)
def test_adapting_is_offered_where_many_images_are_mistaken(adapt, right, images, offered):
    options = {"method": "analytic", "network": "efficientnet-lite0", "pretrained": True}
    config = configure([Layer("test", options | {"adapt": adapt})]).config
    wrong = images - right
    found = advise(confusion([right, wrong], [wrong, right]), known(images, images), config, [0, 1])
    assert any("--adapt auto" in sentence for sentence in found) == offered


# ------------------------------------------------------------------------------------------------------------ backbones


class StandIn(nn.Module):
    """The part of a timm model that is used."""

    output_fmt = "NCHW"
    num_features = 6

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 4, stride=4)

    def forward_features(self, x):
        return self.conv(x)


@pytest.fixture
def timm(monkeypatch):
    made = []
    module = ModuleType("timm")
    module.is_model = lambda name: name == "standin"
    module.list_models = lambda: ["standin"]
    module.create_model = lambda name, **options: made.append(options) or StandIn()
    module.get_pretrained_cfg = lambda name: SimpleNamespace(
        input_size=(3, 16, 16), mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4)
    )
    monkeypatch.setitem(sys.modules, "timm", module)
    return made


def test_a_pretrained_backbone_comes_with_its_size_and_colors(model, weeks, timm):
    model.learn(weeks[0], network="timm:standin", **QUICK)
    now = state.load(Directory(model.path))
    assert (now.transform.size, now.transform.mean, now.transform.std) == (
        16,
        (0.5, 0.4, 0.3),
        (0.2, 0.3, 0.4),
    )
    assert timm[0]["pretrained"] is True
    assert now.model.network is not None  # built when it is first asked for
    assert timm[-1]["pretrained"] is False  # loading a model fetches nothing
    model.learn(weeks[1], network="timm:standin", **QUICK)
    assert len(model.predict(weeks[1])) == 30


def test_weights_from_a_file(model, weeks, timm, tmp_path):
    from safetensors.torch import save_file

    save_file(
        {"conv.weight": torch.full((6, 3, 4, 4), 0.25), "conv.bias": torch.zeros(6)},
        tmp_path / "w.safetensors",
    )
    model.learn(
        weeks[0], network="timm:standin", weights=tmp_path / "w.safetensors", lr=1e-12, **QUICK
    )
    assert timm[0]["pretrained"] is False
    weight = state.load(Directory(model.path)).model.network.backbone.model.conv.weight
    torch.testing.assert_close(weight, torch.full_like(weight, 0.25))


def test_without_the_extra_one_line_says_what_to_install(model, weeks, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(MissingExtraError, match=r"\[timm\]"):
        model.learn(weeks[0], network="timm:resnet18")
    assert not model.path.exists()


# ------------------------------------------------------------------------------------------------------------ slow bars


@pytest.mark.slow
def test_digits_reach_ninety_percent(model, tmp_path, digits):
    """60 images a class, 5 + 5 classes, no option set: at least 90 % on all ten after the second step."""
    for number, classes in enumerate((range(5), range(5, 10))):
        model.learn(write_digits(tmp_path / f"week{number}", digits, classes, 60))
    names = [f"digit {label}" for label in digits.test.labels.tolist()]
    assert model.evaluate(digits.test.pixels, names).accuracy >= 90


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
        for i in (data.train.labels == label).nonzero().flatten()[:200].tolist():
            data.train.decode(i).save(folder / f"{i}.png")
    test = data.test.select(data.test.labels < 20)
    names = [data.classes[label] for label in test.labels.tolist()]
    ours = IncrementalClassifier(tmp_path / "ours")
    ours.learn(tmp_path / "week1", method="lucir")
    plain = IncrementalClassifier(tmp_path / "plain")
    (tmp_path / "plain").mkdir()
    for path in (tmp_path / "ours").rglob("*"):  # both start from the same first step
        target = tmp_path / "plain" / path.relative_to(tmp_path / "ours")
        target.mkdir(exist_ok=True) if path.is_dir() else target.write_bytes(path.read_bytes())
    ours.learn(tmp_path / "week2")
    plain.learn(tmp_path / "week2", distill="none", margin_weight=0.0, exemplars=0)
    kept = ours.evaluate(test.pixels, names).per_step[1]
    assert kept >= 1.5 * plain.evaluate(test.pixels, names, classifier="cnn").per_step[1]


def test_steps_are_prepared_without_contradictions(weeks, digits):
    intake = intakes.take(weeks[0])
    decoded = squares.decode(intake, 8, 1)
    first, *_, last = decoded.digests
    twice = replace(decoded, digests=(first, first, last, *decoded.digests[3:]))
    ready = preparing.prepare(intake, twice, None, 1)
    assert len(ready.images) == 27
    assert ready.problems == (
        (intake.names[1], f"the same picture as {intake.names[0]}"),
        (intake.names[2], f"the same picture as {intake.names[-1]} in another class"),
        (intake.names[-1], f"the same picture as {intake.names[2]} in another class"),
    )
