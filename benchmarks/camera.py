"""The frame rate of the live camera on the page of `geodl serve`.

    python -m benchmarks.camera [--seconds 20] [--network efficientnet-lite0] [--image-size 224]

Chromium plays its fake camera, 640 x 480, on the page of a server in another process; both share the cores. An answer is a frame
that was drawn, encoded, sent, predicted and displayed. Needs playwright and Chromium.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from playwright.sync_api import Page, sync_playwright
from tests.helpers.browser import BROWSER, FLAGS

from benchmarks.pictures import write_photographs
from benchmarks.serve import served
from geodl.app.classifier import IncrementalClassifier
from geodl.core.devices import available_cores
from geodl.core.text import count

WARM = 10
"""First answers, which are not counted."""


def answers(page: Page, address: str, seconds: float) -> list[float]:
    """Open the camera on a page and return the times at which answers arrived."""
    times: list[float] = []

    def note(url: str) -> None:
        if "/predict" in url:
            times.append(time.perf_counter())

    page.on("requestfinished", lambda request: note(request.url))
    page.goto(address)
    page.get_by_role("button", name="Camera", exact=True).click()
    while len(times) <= WARM or times[-1] - times[WARM] < seconds:
        page.wait_for_timeout(100)
    return times[WARM:]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--network", default="efficientnet-lite0")
    parser.add_argument("--image-size", type=int, default=224)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        root = Path(folder)
        write_photographs(root / "photos", 40, 640)
        model = IncrementalClassifier(root / "model")
        model.learn(root / "photos", network=options.network, image_size=options.image_size)
        browser = driver.chromium.launch(executable_path=BROWSER, args=FLAGS)
        with served(root / "model") as (_, port):
            page = browser.new_page(permissions=["camera"])
            times = answers(page, f"http://127.0.0.1:{port}/", options.seconds)
        browser.close()
    gaps = np.diff(times)
    what = f"{options.network} at {options.image_size} pixels"
    typical, high = 1000 * np.median(gaps), 1000 * np.percentile(gaps, 95)
    print(
        f"{what}, {count(available_cores(), 'core')}: {len(gaps) / (times[-1] - times[0]):.1f} answers a second, "
        f"one after {typical:.0f} ms (median), {high:.0f} ms (95 %)"
    )


if __name__ == "__main__":
    main()
