"""Draw docs/serve-*.png: the page of `geodl serve`, which learned drawings of shapes, three of them in wrong folders.

Run with `python docs/make_page_pictures.py`; it needs the extras `serve`, `pretrained` and `test`, and Chromium.
"""

import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image, ImageDraw
from playwright.sync_api import Browser, Page, sync_playwright

from geodl import IncrementalClassifier

HERE = Path(__file__).parent
SHAPES = ("circle", "hexagon", "ring", "square", "star", "triangle")
CORNERS = {"triangle": 3, "square": 4, "hexagon": 6, "heptagon": 7}
MISPLACED = {("circle", 11): "ring", ("star", 7): "triangle", ("square", 19): "hexagon"}
"""The folder of a drawing that is not in that of its shape."""
DRAWINGS, SIDE, SCALE = 24, 224, 4
TOKEN = "pictures-of-the-page"
LEARNED = "#knows"
SHOWN = """() => [...document.images].every(image => {
  const place = image.getBoundingClientRect();
  return !place.width || place.bottom < 0 || place.top > innerHeight || (image.complete && image.naturalWidth);
})"""
"""Whether all images in view are loaded."""


def drawing(shape: str, draw: random.Random) -> Image.Image:
    """Return a shape of random color, size, place and rotation on a light background."""
    side = SIDE * SCALE
    background = tuple(draw.randint(200, 255) for _ in range(3))
    color = tuple(draw.randint(10, 170) for _ in range(3))
    image = Image.new("RGB", (side, side), background)
    canvas, radius = ImageDraw.Draw(image), side * draw.uniform(0.18, 0.32)
    x, y = (side / 2 + side * draw.uniform(-0.12, 0.12) for _ in range(2))
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        canvas.ellipse(box, fill=color)
    elif shape == "ring":
        canvas.ellipse(box, outline=color, width=int(radius / 4))
    else:
        turn, count = draw.uniform(0, 2 * math.pi), CORNERS.get(shape, 10)
        reach = [radius, radius * (0.4 if shape == "star" else 1)]
        angles = [turn + 2 * math.pi * i / count for i in range(count)]
        corners = [
            (x + reach[i % 2] * math.cos(each), y + reach[i % 2] * math.sin(each))
            for i, each in enumerate(angles)
        ]
        canvas.polygon(corners, fill=color)
    return image.resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def write_drawings(folder: Path) -> list[Path]:
    """Write the folders of the shapes; return two more drawings: of a shape unknown so far, and of a known one."""
    draw = random.Random(3)
    for shape in SHAPES:
        for number in range(DRAWINGS):
            label = MISPLACED.get((shape, number), shape)
            (folder / "shapes" / label).mkdir(parents=True, exist_ok=True)
            drawing(shape, draw).save(folder / "shapes" / label / f"{shape} {number:02}.png")
    more = [folder / "scan 1.png", folder / "scan 2.png"]
    for shape, path in zip(("heptagon", "star"), more, strict=True):
        drawing(shape, draw).save(path)
    return more


@contextmanager
def served(model: Path) -> Iterator[str]:
    """Serve a model and yield the address of its page."""
    command = [sys.executable, "-m", "geodl", "serve", str(model), "--port", "0"]
    environment = os.environ | {"GEODL_TOKEN": TOKEN, "COLUMNS": "200"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        found = None
        while found is None:
            found = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        try:
            yield f"{found[0]}/#token={TOKEN}"
        finally:
            process.terminate()


def opened(browser: Browser, address: str, width: int, height: int, *, dark: bool) -> Page:
    """Open the page with what it has learned."""
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        locale="en-US",
    )
    page = context.new_page()
    page.goto(address)
    page.locator(LEARNED).locator("img").first.wait_for()
    return page


def wait_for_images(page: Page) -> None:
    """Wait until all images in view are loaded."""
    while not page.evaluate(SHOWN):
        page.wait_for_timeout(50)


def main() -> None:
    """Learn, serve, and take the pictures."""
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as driver:
        more, model = write_drawings(Path(scratch)), Path(scratch) / "model" / "shapes"
        IncrementalClassifier(model).learn(Path(scratch) / "shapes")
        chromium = shutil.which("chromium")
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        with served(model) as address:
            page = opened(browser, address, 1180, 2600, dark=False)
            wait_for_images(page)
            page.locator(LEARNED).screenshot(path=HERE / "serve-learned.png")
            phone = opened(browser, address, 390, 844, dark=True)
            phone.locator(LEARNED).evaluate("card => scrollTo(0, card.offsetTop - 12)")
            wait_for_images(phone)
            phone.screenshot(path=HERE / "serve-phone.png")
            page.set_input_files("#file", [str(path) for path in more])
            unknown = page.locator(".results > li").filter(has_text="scan 1.png")
            unknown.locator(".fix input").fill("heptagon")
            unknown.get_by_role("button", name="Correct").click()
            page.get_by_text("To be taught as heptagon").wait_for()
            wait_for_images(page)
            page.mouse.move(0, 0)
            card = page.locator("#recognize").bounding_box()
            assert card is not None
            size = {"x": 0, "y": 0, "width": 1180, "height": card["y"] + card["height"] + 12}
            page.screenshot(path=HERE / "serve-page.png", clip=size)
        browser.close()


if __name__ == "__main__":
    main()
