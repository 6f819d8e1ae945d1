"""Unusable files in a user's folders are reported in one line each, and the rest is used."""

import os
from pathlib import Path

import pytest
from tests.helpers.pictures import bomb, picture

from geodl.app.classifier import IncrementalClassifier
from geodl.core.errors import DataError
from geodl.learning.learner import Learner

QUICK = {"epochs": 1, "threads": 1, "workers": 2, "network": "convnet", "image_size": 8}


@pytest.fixture
def folder(tmp_path):
    for number, name in enumerate(("cat", "dog")):
        for i in range(3):
            picture(tmp_path / "photos" / name / f"{i}.png", 10 * number + i)
    return tmp_path / "photos"


@pytest.fixture
def model(tmp_path):
    return IncrementalClassifier(tmp_path / "model")


def truncated(path: Path) -> None:
    picture(path, 99, (64, 64))
    path.write_bytes(path.read_bytes()[:-2000])


BAD = {
    "notes.txt": (lambda path: path.write_text("hello"), "not an image"),
    "drawing.svg": (lambda path: path.write_text("<svg/>"), "a drawing without pixels"),
    "empty.jpg": (lambda path: path.write_bytes(b""), "the file is empty"),
    "torn.png": (truncated, "truncated"),
    "dot.png": (lambda path: picture(path, 5, (1, 1)), "only 1 x 1 pixels"),
    "bomb.png": (lambda path: path.write_bytes(bomb()), "larger than the limit"),
    "lost.png": (lambda path: path.symlink_to("nowhere"), "a broken link"),
    "double.png": (
        lambda path: path.write_bytes((path.parent / "0.png").read_bytes()),
        "the same picture as cat/0.png",
    ),
    "loop": (lambda path: path.symlink_to(path.parent), "a link to a folder that is read already"),
}


@pytest.mark.parametrize("name", ["notes.txt", "torn.png", "dot.png", "double.png", "loop"])
def test_bad_files_are_named_and_the_rest_is_learned(model, folder, name):
    make, reason = BAD[name]
    make(folder / "cat" / name)
    before = sorted(str(path) for path in folder.rglob("*"))
    with pytest.raises(DataError, match=reason):
        model.learn(folder, strict=True, **QUICK)
    assert not model.path.exists()
    result = model.learn(folder, **QUICK)
    assert result.images == 6
    ((where, why),) = result.skipped
    assert reason in why
    assert "\n" not in why
    assert name in where
    assert sorted(str(path) for path in folder.rglob("*")) == before


def test_empty_classes_and_classes_of_bad_files_are_skipped(model, folder):
    (folder / "bird").mkdir()
    (folder / "fish").mkdir()
    truncated(folder / "fish" / "a.png")  # its header is intact
    result = model.learn(folder, **QUICK)
    assert result.classes == ("cat", "dog")
    assert dict(result.skipped)["bird"] == "no images in this class folder"
    assert "truncated" in dict(result.skipped)["fish/a.png"]


def test_no_name_breaks_a_line(model, folder):
    (folder / "cat" / "two\nlines.png").write_text("no image")
    (folder / "a\x1b[31mred").mkdir()
    skipped = dict(model.learn(folder, **QUICK).skipped)
    assert set(skipped) == {"cat/two\\nlines.png", "a\\x1b[31mred"}


def test_a_stored_picture_under_another_class_is_named(model, folder, tmp_path):
    model.learn(folder, **QUICK)
    (tmp_path / "more" / "bird").mkdir(parents=True)
    (tmp_path / "more" / "bird" / "same.png").write_bytes((folder / "cat" / "0.png").read_bytes())
    picture(tmp_path / "more" / "bird" / "new.png", 78)
    result = model.learn(tmp_path / "more", **QUICK)
    assert result.skipped == (
        ("bird/same.png", "the same picture is known as class 'cat' already"),
    )
    (tmp_path / "more" / "bird" / "new.png").unlink()
    with pytest.raises(DataError, match="no image is left to learn from"):
        model.learn(tmp_path / "more", **QUICK)


def test_a_folder_without_class_folders_is_explained(model, tmp_path):
    picture(tmp_path / "flat" / "a.png", 1)
    with pytest.raises(DataError, match="put the images of each class into a folder of its own"):
        model.learn(tmp_path / "flat", **QUICK)
    assert not model.path.exists()


def test_prediction_names_bad_files_and_goes_on(model, folder):
    model.learn(folder, **QUICK)
    for name in ("notes.txt", "empty.jpg", "torn.png", "dot.png", "bomb.png"):
        BAD[name][0](folder / "cat" / name)
    (folder / "cat" / "loop").symlink_to(folder, target_is_directory=True)
    (folder / "cat" / ".hidden").write_text("no")
    picture(folder.parent / "elsewhere" / "3.png", 55)
    (folder / "dog" / "linked").symlink_to(folder.parent / "elsewhere", target_is_directory=True)
    found = model.predict([folder, folder / "cat" / "0.png", "nowhere.jpg"])
    order = ["0.png", "1.png", "2.png"] * 2 + ["3.png", "0.png"]
    assert [Path(each.name).name for each in found] == order
    skipped = dict(found.skipped)
    names = ("loop", "bomb.png", "dot.png", "empty.jpg", "notes.txt", "torn.png")
    assert set(skipped) == {"nowhere.jpg", *(f"{folder}/cat/{name}" for name in names)}
    assert skipped["nowhere.jpg"] == "no such file or folder"
    for name in names:
        assert BAD[name][1] in skipped[f"{folder}/cat/{name}"]
    assert found.rate > 0


def test_evaluation_names_bad_files_and_goes_on(model, folder):
    model.learn(folder, **QUICK)
    truncated(folder / "dog" / "torn.png")
    found = model.evaluate(folder)
    assert found.images == 6
    assert found.skipped == (("dog/torn.png", "the file is truncated"),)


@pytest.mark.timeout(60)
def test_a_model_that_refers_to_pipes_opens_none_of_them(tmp_path):
    """A stranger's model names any path instead of an image."""
    for i in range(8):
        picture(tmp_path / "photos" / "ab"[i % 2] / f"{i}.png", i, (80, 70))
    learner = Learner(**QUICK, exemplars=2, store_images=False)
    learner.learn(tmp_path / "photos")
    learner.save(tmp_path / "model")
    for path in sorted((tmp_path / "photos").rglob("*.png")):
        path.unlink()
        os.mkfifo(path)
    model = IncrementalClassifier(tmp_path / "model")
    assert model.info()["classes"]
    shown = picture(tmp_path / "c" / "shown.png", 9, (80, 70))
    assert len(model.predict(shown)) == 1
    loaded = Learner.load(tmp_path / "model")
    with pytest.raises(DataError, match="outside the data directory; set data_dir"):
        loaded.learn([shown, shown], ["c", "d"])
    with pytest.raises(DataError, match="not a regular file"):
        Learner.load(tmp_path / "model", data_dir=tmp_path)
