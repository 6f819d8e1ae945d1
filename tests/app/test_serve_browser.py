"""The page of `geodl serve` in a real browser: teach, recognize, correct, undo; evil names, broken images, a phone."""

import csv
import re
import shutil
from pathlib import Path

import pytest
from PIL import Image
from tests.helpers.browser import BROWSER, NAMELESS, until
from tests.helpers.folders import digits_of
from tests.helpers.serving import QUICK, TOKEN, encoded, pictures, running

from geodl.app.classifier import IncrementalClassifier

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
EVIL = "<img src=x onerror=alert(1)>"


def files(contents, name):
    return [
        {"name": f"{name}-{i}.png", "mimeType": "image/png", "buffer": each}
        for i, each in enumerate(contents)
    ]


def fill(page, label, some):
    """Make a class by keyboard and choose its images."""
    page.locator("#new-name").focus()
    page.keyboard.type(label)
    page.keyboard.press("Enter")
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name=f"Add images to {label}", exact=True).click()
    chooser.value.set_files(some)


def teach(page):
    page.locator("#go").click()
    page.wait_for_selector(".job.done, .job.failed")
    said = page.locator(".job").inner_text()
    page.get_by_role("button", name="Dismiss").click()
    return said


def names(page):
    return page.locator("#classes strong").all_inner_texts()


def test_teach_recognize_correct_and_undo(opened, tmp_path, digits):
    path = tmp_path / "numbers"
    with running(path) as url, opened(url) as page:
        assert TOKEN not in page.url
        assert page.locator("h1").inner_text() == "numbers"
        assert "It knows nothing yet" in page.locator("#lead").inner_text()
        # two classes, one of them with a name that would act, and with a broken image
        fill(page, "zero", files(pictures(digits, 0), "a"))
        bad = {"name": "bad.png", "mimeType": "image/png", "buffer": b"broken"}
        fill(page, EVIL, [*files(pictures(digits, 1), "b"), bad])
        page.wait_for_selector(".broken")
        assert "bad.png: not an image" in page.locator(".flaw").inner_text()
        assert page.locator("#go").inner_text() == "Teach 25 images"
        collected = page.locator(".tray strong").all_inner_texts()
        assert collected == ["zero 12 images", f"{EVIL} 13 images"]
        assert page.evaluate(NAMELESS) == []
        said = teach(page)
        assert f"Learned zero, {EVIL} from" in said
        assert f"{EVIL}/bad.png: not an image" in said
        assert page.locator(".flaw").inner_text() == "bad.png: not an image"
        page.get_by_role("button", name="Take bad.png out").focus()
        page.keyboard.press("Enter")
        page.locator(".tray").wait_for(state="hidden")
        assert names(page) == ["zero", EVIL]
        # a third one
        fill(page, "two", files(pictures(digits, 2), "c"))
        teach(page)
        assert names(page) == ["zero", EVIL, "two"]
        assert "3 classes" in page.locator("#lead").inner_text()
        # recognize, and correct by one click
        page.set_input_files(
            "#file", [*files(pictures(digits, 0, slice(30, 31)), "d"), *files([b"broken"], "e")]
        )
        page.wait_for_selector(".results .bars")
        assert page.locator(".results .verdict strong").count() == 2
        assert "not an image" in page.locator(".results .flaw").inner_text()
        assert page.locator(".results .bars button").count() == 3
        assert page.locator(".similar img").count() == 4
        page.get_by_role("button", name=re.compile("Teach this image as two")).focus()
        page.keyboard.press("Enter")
        page.get_by_text("To be taught as two").wait_for()
        assert page.locator(".tray strong").inner_text() == "two 1 image, known already"
        page.locator(".fix input").fill("new one")
        page.get_by_role("button", name="Correct").click()
        page.get_by_text("To be taught as new one").wait_for()
        assert page.locator(".tray strong").inner_text() == "new one 1 image"
        page.get_by_role("button", name="Drop the class new one").click()
        page.locator(".noted").wait_for(state="hidden")
        # rename and undo
        page.get_by_role("button", name=f"Rename {EVIL}").click()
        page.locator("#ask-input").fill("one")
        page.keyboard.press("Enter")
        page.get_by_text(f"Renamed {EVIL} to one").wait_for()
        assert names(page) == ["zero", "one", "two"]
        page.locator("#undo").click()
        until(page, "document.querySelectorAll('#steps li').length === 2")
        page.locator("#undo").click()
        until(page, "document.querySelectorAll('#steps li').length === 1")
        assert names(page) == ["zero", EVIL]
        page.get_by_role("button", name="Remove zero").click()
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Remove zero").click()
        page.locator("#ask-yes").click()
        page.get_by_text("Removed zero").wait_for()
        assert IncrementalClassifier(path).classes == (EVIL,)
        # changes by another program
        IncrementalClassifier(path).rename(EVIL, "by another program")
        page.get_by_text("by another program", exact=True).first.wait_for()
        assert page.evaluate(NAMELESS) == []
        assert page.locator("[onerror], script:not([src])").count() == 0


@pytest.fixture(scope="module")
def base(tmp_path_factory, digits):
    path = tmp_path_factory.mktemp("browser") / "a model with a rather long name"
    pixels, _ = digits_of(digits, (0, 1), 20)
    labels = ["zero"] * 20 + ["w" * 60] * 20
    IncrementalClassifier(path).learn(pixels, labels, **QUICK)
    return path


def test_results_come_in_pages_and_follow_the_model(opened, base, tmp_path, digits):
    """Two tabs of one server: teaching on one changes the answers, the marks and the tray on the other."""
    path = shutil.copytree(base, tmp_path / "model")
    with running(path) as url, opened(url) as page, opened(url) as other:
        some = [each for label in (0, 1, 2) for each in pictures(digits, label, slice(20, 30))]
        page.set_input_files("#file", files([*some, b"broken"], "n"))
        until(page, "document.querySelector('#results-count').textContent === '31 images'")
        assert page.locator(".results > li").count() == 24
        page.get_by_role("button", name="Next").click()
        assert page.locator("#page").inner_text() == "25 to 31 of 31"
        assert page.locator(".results .flaw").count() == 1  # what cannot be used comes last
        with page.expect_download() as download:
            page.get_by_role("button", name="CSV").click()
        rows = list(csv.reader(Path(download.value.path()).read_text().splitlines()))
        assert rows[0][:4] == ["image", "label", "confidence", "nearest"]
        assert sorted(row[0] for row in rows[1:]) == sorted(f"n-{i}.png" for i in range(31))
        sure = [row for row in rows[1:-1] if row[1] != "unknown"]
        margins = [float(row[2]) - float(row[5]) for row in sure]
        assert margins == sorted(margins)
        page.locator("#filter").select_option(label="Cannot be used (1)")
        assert page.locator(".results > li").count() == 1
        # collected on one page, seen on the other one, also after a reload
        other.set_input_files("#file", files(some[-1:], "o"))
        other.locator(".fix input").fill("two")
        other.get_by_role("button", name="Correct").click()
        other.get_by_text("To be taught as two").wait_for()
        page.locator(".tray", has_text="two 1 image").wait_for()
        page.reload()
        page.locator(".tray", has_text="two 1 image").wait_for()
        until(page, "document.querySelector('.thumbs img').naturalWidth > 0")
        fill(page, "two", files(pictures(digits, 2), "t"))
        page.get_by_text("two 13 images").wait_for()
        page.locator("#go").click()
        # the other page follows: its mark is gone, the banner is there, the answer is a new one
        other.locator(".job.done").wait_for()
        until(other, "document.querySelectorAll('.results .bars li').length === 3")
        assert not other.locator(".noted").is_visible()
        page.locator("#undo").click()
        until(other, "document.querySelectorAll('.results .bars li').length === 2")
        other.locator(".job").wait_for(state="hidden")
        page.locator("#redo").click()
        until(other, "document.querySelectorAll('.results .bars li').length === 3")


def test_the_only_step_is_undone_and_redone(opened, base, tmp_path):
    with running(shutil.copytree(base, tmp_path / "model")) as url, opened(url) as page:
        page.locator("#undo").click()
        page.locator("#redo").click()
        until(page, "document.querySelectorAll('#classes li').length === 2")
        assert "zero" in names(page)


def test_cancel_and_folders(opened, base, tmp_path, digits):
    path = shutil.copytree(base, tmp_path / "model")
    folder = tmp_path / "week"
    for label in (2, 3):
        (folder / f"digit {label}").mkdir(parents=True)
        for i, content in enumerate(pictures(digits, label)):
            (folder / f"digit {label}" / f"{i}.png").write_bytes(content)
    with running(path, options={"epochs": 5000, "threads": 1}) as url, opened(url) as page:
        fill(page, "three", [])
        with page.expect_file_chooser() as chooser:
            page.get_by_role("button", name="Add a folder of images to three").click()
        chooser.value.set_files(folder / "digit 3")
        page.get_by_text("three 12 images").wait_for()
        # dropped on a class
        drop = """async (target) => { const transfer = new DataTransfer();
          const canvas = new OffscreenCanvas(16, 16); canvas.getContext("2d").fillRect(2, 2, 9, 9);
          transfer.items.add(new File([await canvas.convertToBlob()], "drawn.png", {type: "image/png"}));
          target.dispatchEvent(new DragEvent("drop", {dataTransfer: transfer, bubbles: true, cancelable: true})); }"""
        page.locator(".tray").evaluate(drop)
        page.get_by_text("three 13 images").wait_for()
        page.locator("#recognize").evaluate(drop)
        page.wait_for_selector(".results .bars")
        page.locator("#go").click()
        until(page, "document.querySelector('.job')?.textContent.includes('epoch')")
        assert "Learning three, epoch" in page.locator(".job").inner_text()
        assert page.locator(".given").count() == 13
        assert page.evaluate(NAMELESS) == []
        page.get_by_role("button", name="Cancel").click()
        page.get_by_text("Cancelled. The model is as it was before three.").wait_for()
        page.get_by_role("button", name="Teach 13 images").wait_for()
    assert IncrementalClassifier(path).info()["unfinished"] is False


@pytest.mark.parametrize(("width", "scheme"), [(320, "light"), (1280, "dark")])
def test_the_page_fits_in_light_and_dark(opened, base, digits, width, scheme):
    with (
        running(base) as url,
        opened(url, viewport={"width": width, "height": 800}, color_scheme=scheme) as page,
    ):
        page.set_input_files("#file", files(pictures(digits, 0, slice(30, 32)), "x" * 80))
        page.wait_for_selector(".results .bars")
        fill(page, "y" * 80, files(pictures(digits, 2), "z"))
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        light = page.evaluate(
            """() => ["backgroundColor", "color"].map((name) =>
              getComputedStyle(document.body)[name].match(/[\\d.]+/g).slice(0, 3).reduce((sum, each) => sum + +each, 0) / 765)"""
        )
        assert light[0] < 0.2 if scheme == "dark" else light[0] > 0.9
        assert light[1] > 0.7 if scheme == "dark" else light[1] < 0.3


def test_the_camera(opened, base, tmp_path):
    """The bars follow the camera; frames are recorded for a class while a button is held, by mouse and by keyboard."""
    path = shutil.copytree(base, tmp_path / "model")
    with running(path) as url, opened(url, permissions=["camera"]) as page:
        page.get_by_role("button", name="Camera", exact=True).click()
        until(page, "document.querySelectorAll('#live li').length === 2")
        seen = """() => ["#live-label", "#live-rate"].map((each) => document.querySelector(each).textContent)"""
        until(page, "document.querySelector('#live-rate').textContent !== ''")
        label, rate = page.evaluate(seen)
        assert label in ("zero", "w" * 60, "Unknown: unlike all classes")
        assert float(rate.removesuffix(" answers a second")) > 0
        confidences = page.locator("#live li b").all_inner_texts()
        assert abs(sum(int(each.removesuffix(" %")) for each in confidences) - 100) <= 1
        assert page.evaluate(NAMELESS) == []
        page.get_by_role("button", name="Take picture").click()
        page.wait_for_selector(".results .bars", state="attached")
        hold = page.get_by_role("button", name="Hold to record")
        hold.click()  # without the name of a class nothing is recorded
        page.get_by_label("The class to record images for").fill("two")
        hold.hover()
        page.mouse.down()
        page.get_by_text(re.compile("^Recording: ([3-9]|[1-9][0-9]+) images$")).wait_for()
        page.mouse.up()
        collected = page.get_by_text(re.compile("^[0-9]+ images? of two collected for teaching$"))
        collected.wait_for()
        hold.focus()
        page.keyboard.down(" ")
        page.get_by_text(re.compile("^Recording: ")).wait_for()
        page.keyboard.up(" ")
        collected.wait_for()
        page.get_by_role("button", name="Close").click()
        until(page, "document.getElementById('video').srcObject === null")
        assert page.locator(".results .bars").is_visible()
        assert page.locator(".tray strong").inner_text().startswith("two ")
        page.get_by_role("button", name="Camera: take pictures for two").click()
        assert page.locator("#record-name").input_value() == "two"
        page.keyboard.press("Escape")


def test_the_camera_of_an_empty_and_of_a_read_only_model(opened, base, tmp_path):
    with running(tmp_path / "new") as url, opened(url, permissions=["camera"]) as page:
        page.get_by_role("button", name="Camera", exact=True).click()
        page.get_by_role("button", name="Hold to record").wait_for()
    reading = running(base, read_only=True)
    with reading as url, opened(url, token=None, permissions=["camera"]) as page:
        page.get_by_role("button", name="Camera", exact=True).click()
        until(page, "document.querySelectorAll('#live li').length === 2")
        assert not page.get_by_role("button", name="Hold to record").is_visible()


def test_without_the_token_images_are_recognized(opened, base, digits):
    with running(base) as url, opened(url, token=None) as page:
        page.set_input_files("#file", files(pictures(digits, 0, slice(30, 31)), "x"))
        page.wait_for_selector(".results .bars")
        assert page.locator(".similar").count() == 0  # stored images are private
        page.get_by_role("button", name="Rename zero").click()
        page.locator("#ask-input").fill("0")
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Token").wait_for()
        page.locator("#ask-input").fill("wrong")
        page.keyboard.press("Enter")
        page.locator("#problem").get_by_text("needs the token").wait_for()
        page.keyboard.press("Escape")
        assert "zero" in names(page)


def test_read_only(opened, base):
    with running(base, read_only=True) as url, opened(url, token=None) as page:
        assert "read only" in page.locator("#lead").inner_text()
        assert not page.locator("#teach").is_visible()
        assert not page.locator("#undo").is_visible()
        assert page.locator("#classes button").count() == 0
        page.set_input_files("#file", files([encoded(Image.new("RGB", (20, 20)))], "a"))
        page.wait_for_selector(".results .bars")
        assert page.locator(".results .bars button").first.is_disabled()
