"""Which images of a person are of one series, as names, folders and times tell it."""

from pathlib import PurePath

import numpy as np
import pytest
import torch
from benchmarks.series import CLOSE, measure
from PIL import ExifTags, Image

from geodl.app.choices import has_pretrained
from geodl.app.classifier import IncrementalClassifier
from geodl.app.series import check_grouping, clues_of, stem_and_frame
from geodl.closed_form.series import series_of
from geodl.core.errors import ConfigError, DataError
from geodl.data.intake import take


@pytest.fixture(scope="module")
def films(tmp_path_factory):
    """Two classes of two films of three frames, in folders, each taken at a time of its own; and a single picture."""
    root = tmp_path_factory.mktemp("films")
    rng = np.random.default_rng(0)
    for label in "ab":
        for film in range(2):
            folder = root / label / f"day {film}"
            folder.mkdir(parents=True)
            for frame in range(3):
                picture = Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8))
                exif = picture.getexif()
                time = f"2026:05:0{film + 1} 10:00:0{3 * frame}"
                exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.DateTimeOriginal] = time
                picture.save(folder / f"track{film}-{frame:03d}.jpg", exif=exif)
    (root / "c").mkdir()
    Image.new("RGB", (8, 8)).save(root / "c" / "picture.jpg")
    return take(root)


def groups(intake, way):
    z = {"top": torch.randn(len(intake.images), 50, generator=torch.Generator().manual_seed(0))}
    return series_of(z, intake.images.labels, clues_of(intake, way))


SERIES = [0, 0, 0, 3, 3, 3, 6, 6, 6, 9, 9, 9, 12]


@pytest.mark.parametrize("way", ["name", "time", "folder", r"track(\d)", r"day (\d)/"])
def test_a_chosen_way_groups_whatever_the_features_are(films, way):
    assert groups(films, way).tolist() == SERIES


@pytest.mark.parametrize("way", ["none", "auto", r"(no such name)"])
def test_else_unlike_images_are_alone(films, way):
    assert groups(films, way).tolist() == list(range(13))


def test_what_cannot_be_a_way_is_refused():
    for wrong in ("names", "(a)(b)", "(", "film"):
        with pytest.raises(ConfigError, match=r"group_by = .*auto, name, time, folder, none"):
            check_grouping(wrong)
    check_grouping(r"(.*)_\d+")


@pytest.mark.parametrize(
    ("name", "stem", "frame"),
    [
        ("00012_00007.png", "00012#", 7),
        ("00013_00001.png", "00013#", 1),
        ("day 2/00012_00001.png", "day 2/00012#", 1),
        ("day 1/IMG 12 (3).jpg", "day 1/IMG 12#", 3),
        ("2.jpg", "#", 2),
        ("rose.jpg", None, -1),
    ],
)
def test_a_name_may_end_in_the_number_of_a_frame(name, stem, frame):
    assert stem_and_frame(PurePath(name)) == (stem, frame)


def test_times_and_names_that_are_odd_are_no_clue(tmp_path):
    (tmp_path / "a").mkdir()
    for i, text in enumerate(["0000:00:00 00:00:00", "yesterday", "2026:13:01 00:00:00"]):
        picture = Image.new("RGB", (8, 8), (i, 0, 0))
        picture.getexif()[ExifTags.Base.DateTime] = text
        picture.save(tmp_path / "a" / f"{'xyz'[i]}.jpg", exif=picture.getexif())
    clues = clues_of(take(tmp_path), "auto")
    assert (clues[:, 2:] == -1).all()


@pytest.mark.slow
@pytest.mark.skipif(not has_pretrained(), reason="the extra `pretrained` is not installed")
@pytest.mark.parametrize(("name", "series"), [("signs12", (48, 72)), ("crops", (100, 150, 200))])
def test_what_is_claimed_of_series_is_true(name, series, signs, flowers, tmp_path):
    """Drive-bys known by name, and crops of photographs known by their features."""
    steps = measure(signs.parent, name, tmp_path)
    assert len(steps) == len(series)
    for step, number in zip(steps, series, strict=True):
        low, high = step["interval"]
        assert low <= step["test"] <= high
        assert abs(step["test"] - step["claimed"]) <= CLOSE
        assert step["series"] == pytest.approx(number, rel=0.1)


def test_series_that_are_called_alike_in_each_class_are_learned_and_evaluated(tmp_path, digits):
    root, model = tmp_path / "videos", IncrementalClassifier(tmp_path / "model")
    for label in (0, 1):
        rows = (digits.train.labels == label).nonzero().flatten().tolist()
        for i in range(12):
            folder = root / f"digit {label}" / f"video {i // 6}"
            folder.mkdir(parents=True, exist_ok=True)
            digits.train.decode(rows[i]).save(folder / f"{i}.png")
    with pytest.raises(DataError, match="--group-by folder"):
        model.learn(root)
    done = model.learn(root, group_by="folder", epochs=1, threads=1)
    assert done.new == ("digit 0", "digit 1")
    assert model.evaluate(root).images == 24
