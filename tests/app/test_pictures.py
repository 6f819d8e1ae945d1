"""Pictures that a model in closed form keeps to show: encoded, stored once, read when they are shown."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from tests.helpers.pictures import noise
from tests.helpers.shapes import SHAPES, pictures

from geodl import IncrementalClassifier
from geodl.app import state as states
from geodl.app.choices import has_pretrained
from geodl.app.pictures import Pictures
from geodl.data.batches import resized
from geodl.data.images import ArrayImages
from geodl.store import Directory
from geodl.store.head import DamagedError

pytestmark = pytest.mark.skipif(
    not has_pretrained(), reason="the extra `pretrained` is not installed"
)
QUICK = {"image_size": 64, "exemplars": 4}
SAVED = {"photo": ("jpg", 100), "large": ("jpg", 1000), "drawing": ("png", 40), "scan": ("bmp", 70)}


def save_class(folder, name: str, seed: int = 0) -> None:
    """Save four pictures of smooth color, each with its own: a class of files of one kind and size."""
    kind, side = SAVED[name]
    rng = np.random.default_rng([seed, sorted(SAVED).index(name)])
    for i in range(4):
        small = Image.fromarray(rng.integers(0, 256, (3, 4, 3), dtype=np.uint8))
        (folder / name).mkdir(parents=True, exist_ok=True)
        small.resize((side + 20, side)).save(folder / name / f"{i}.{kind}")


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A model of two steps, and the folders that it learned."""
    path = tmp_path_factory.mktemp("pictures")
    for name in SAVED:
        save_class(path / ("week1" if name in ("photo", "large") else "week2"), name)
    model = IncrementalClassifier(path / "model")
    for week in ("week1", "week2"):
        model.learn(path / week, **QUICK)
    return model, path


def kept(model, name: str) -> list[bytes]:
    found = model.validation
    rows = (found.labels == model.classes.index(name)).nonzero().flatten().tolist()
    return [found.encoded(i) for i in rows]


def test_small_files_are_kept_as_they_came_and_others_as_what_the_network_sees(taught):
    model, path = taught
    for week, name in (("week1", "photo"), ("week2", "drawing")):
        files = sorted(file.read_bytes() for file in (path / week / name).iterdir())
        assert sorted(kept(model, name)) == files
    for name in ("large", "scan"):
        assert {Image.open(io.BytesIO(each)).size for each in kept(model, name)} == {(64, 64)}
    sizes = [len(each) for name in SAVED for each in kept(model, name)]
    assert model.info()["stored_bytes"] == sum(sizes)
    assert model.info()["stored_images"] == 16
    # A model knows an image by the pixels that it learned.
    assert model.validation.item_digests() == resized(model.validation, 64).item_digests()


def test_states_share_them_and_predicting_reads_none(taught, tmp_path):
    model, path = taught
    first, second = (Directory(model.path).phase(i).files for i in (0, 1))
    shown = [
        {f for n, f in files.items() if n.startswith("pictures/")} for files in (first, second)
    ]
    assert len(shown[0]) == 8
    assert shown[0] < shown[1]
    copy = IncrementalClassifier((path / "model").rename(path / "moved"))
    try:
        for digest, _ in shown[1]:
            (copy.path / "objects" / digest).rename(tmp_path / digest)
        assert len(copy.predict(path / "week1").probabilities) == 8
        with pytest.raises(DamagedError, match="undo"):
            copy.validation.decode(0)
    finally:
        for digest, _ in shown[1]:
            (tmp_path / digest).rename(copy.path / "objects" / digest)
        copy.path.rename(path / "model")


def test_files_that_are_no_images_are_skipped_also_where_there_is_nothing_else(taught, tmp_path):
    (tmp_path / "note.jpg").write_text("no image")
    found = taught[0].predict(tmp_path / "note.jpg")
    assert len(found) == 0
    assert found.probabilities.shape == (0, 4)
    assert [name for name, _ in found.skipped] == [str(tmp_path / "note.jpg")]


def test_images_that_are_all_shown_are_learned_again(tmp_path):
    save_class(tmp_path / "week", "photo")
    save_class(tmp_path / "week", "drawing")
    model = IncrementalClassifier(tmp_path / "model")
    options = QUICK | {"exemplars": 10, "threads": 1}
    model.learn(tmp_path / "week", **options)
    model.learn(tmp_path / "week", again=True, **options)
    assert [each["images"] for each in model.info()["classes"]] == [4, 4]
    assert len(model.validation) == 8


def test_a_kept_picture_is_named_moved_and_forgotten(taught, tmp_path):
    _, path = taught
    model = IncrementalClassifier(tmp_path / "model")
    model.learn(path / "week1", **QUICK)
    name = model.info()["stored"][0]["from"]
    was, other = name.split("/")[0], next(each for each in model.classes if each not in name)
    before = kept(model, was)
    model.relabel(name, other)
    assert len(kept(model, was)) == 3
    assert before[0] in kept(model, other)
    model.forget(name)
    assert before[0] not in kept(model, other)


def test_mistaken_pictures_are_kept_first(tmp_path):
    model = IncrementalClassifier(tmp_path / "model")
    model.learn(*pictures(SHAPES[:1], 4), image_size=64)
    # two classes that nobody can tell apart
    model.learn(noise(30, 64, 64, 3), ["a", "b"] * 15, image_size=64, exemplars=3)
    judged = model.state().model.judged(model.validation)
    assert torch.bincount(judged.labels).tolist() == [4, 3, 3]
    assert (judged.predictions != judged.labels)[judged.labels > 0].all()


def test_squares_of_an_earlier_version_become_pictures_at_the_next_change(
    taught, tmp_path, monkeypatch
):
    _, path = taught
    model = IncrementalClassifier(tmp_path / "model")
    model.learn(path / "week1", **QUICK)
    now = states.load(Directory(model.path))
    squares = resized(now.validation, 64)
    with monkeypatch.context() as patch, (store := Directory(model.path)).lock():
        patch.setattr(states, "in_closed_form", lambda method: False)
        states.save(store, states.replace(now, validation=squares))
    assert isinstance(model.validation, ArrayImages)
    digests = model.validation.item_digests()
    model.rename("photo", "snapshot")
    assert isinstance(model.validation, Pictures)
    assert model.validation.item_digests() == digests
    assert torch.equal(resized(model.validation, 64).pixels, squares.pixels)
