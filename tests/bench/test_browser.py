"""The page in a browser: plots, no requests, no errors, light and dark, wide and narrow."""

import re

import pytest
from tests.helpers.browser import opened
from tests.helpers.reports import EVIL, evil_page, render

from geodl.core.text import printable

PROBE = """() => {
const seen = {};
seen.width = innerWidth;
seen.overflow = document.documentElement.scrollWidth - innerWidth;
seen.plots = [...document.querySelectorAll(".plot")].map((plot) => {
  const box = plot.querySelector("svg").getBoundingClientRect();
  return {name: plot.dataset.prefix, shown: plot.offsetParent !== null, width: box.width, height: box.height};
});
seen.images = [...document.querySelectorAll(".strips img")].map((image) => [image.complete, image.naturalWidth]);
const light = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0) / 765;
seen.page = light(getComputedStyle(document.body).backgroundColor);
seen.text = light(getComputedStyle(document.querySelector(".plot svg text")).fill);
const tip = document.getElementById("tip");
const hover = (target, x, y) => {
  target.dispatchEvent(new PointerEvent("pointermove", {clientX: x, clientY: y, bubbles: true}));
  return tip.hidden ? null : tip.textContent;
};
const mark = document.querySelector("[id='accuracy-line-0'] use");
if (mark) {
  const box = mark.getBoundingClientRect();
  seen.point = hover(mark, box.left + box.width / 2, box.top + box.height / 2);
}
const matrix = [...document.querySelectorAll(".plot[data-prefix^=confusion]")].find((plot) => plot.offsetParent);
const box = matrix.querySelector("image").getBoundingClientRect();
seen.cell = hover(matrix.querySelector("svg"), box.left + 2, box.top + 2);
const button = matrix.querySelector("button");
if (button) {
  button.click();
  seen.enlarged = matrix.querySelector("svg").getBoundingClientRect().width;
  seen.name = [...matrix.querySelectorAll("text")].find((text) => text.textContent === "class 1").getBoundingClientRect().height;
  seen.heading = matrix.querySelector("[id$='-axis-x'] text").getBoundingClientRect().height;
  seen.overflowEnlarged = document.documentElement.scrollWidth - innerWidth;
}
const second = document.querySelector(".tabs > label:nth-of-type(2)");
second.click();
seen.switched = [...document.querySelectorAll(".tabs > article")].map((article) => getComputedStyle(article).display);
return seen;
}"""
# The same, where classes have evil names.
EVIL_PROBE = """() => {
const texts = (selector) => [...document.querySelectorAll(selector)].map((element) => element.textContent.trim());
const seen = {evil: window.evil, last: document.body.lastElementChild.tagName};
seen.footer = texts("footer");
seen.plots = document.querySelectorAll(".plot svg").length;
seen.scripts = document.querySelectorAll("script:not([type])").length;
seen.bars = texts(".tabs > article:first-of-type .bars span");
seen.exemplars = texts(".strips figcaption");
seen.drawn = texts(".plot[data-prefix*=confusion] text");
seen.tips = JSON.parse(document.querySelector(".plot[data-prefix*=confusion] script").textContent).heat.rows;
seen.handlers = ["onerror", "onmouseover", "onfocus", "autofocus"].map((name) => document.querySelectorAll(`[${name}]`).length);
return seen;
}"""


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_page_of_a_run(browser, runs, tmp_path, width, dark):
    text = render(runs, "geo-1")
    seen, said, asked = opened(browser, text, tmp_path, PROBE, width=width, dark=dark)
    assert (said, asked) == ([], [])
    assert seen["width"] == width
    assert seen["overflow"] <= 0
    plots = [plot for plot in seen["plots"] if plot["shown"]]
    names = (
        "accuracy forgetting similarity angles angles-training groups-nme confusion-nme training"
    )
    assert {plot["name"] for plot in plots} == set(names.split())
    assert all(plot["width"] > 200 and plot["height"] > 80 for plot in plots)
    assert len(seen["images"]) == 6
    # Text stands out from the page, in both schemes.
    assert seen["page"] < 0.2 if dark else seen["page"] > 0.9
    assert seen["text"] > 0.5 if dark else seen["text"] < 0.5
    assert re.fullmatch(r"CNN\nclasses learned 3: [\d.]+ %", seen["point"])
    assert re.search(r"\ncorrect: \d \([\d.]+ %\)$", seen["cell"])
    assert seen["switched"] == ["none", "block", "none", "none"]


def test_a_large_matrix_can_be_enlarged(browser, runs, tmp_path):
    seen, *wrong = opened(browser, render(runs, "cifar"), tmp_path, PROBE, width=390)
    assert wrong == [[], []]
    assert seen["overflow"] <= 0
    assert seen["enlarged"] > 1500
    assert seen["heading"] < 1.5 * seen["name"]  # not as much larger as the rest
    assert seen["overflowEnlarged"] <= 0


def test_the_check_itself_notices_errors_and_requests(browser, runs, tmp_path):
    address = "https://example.invalid/x.png"
    bad = f'<img src="{address}"><script>undefinedName.x</script></footer>'
    text = render(runs, "geo-1").replace("</footer>", bad)
    _, said, asked = opened(browser, text, tmp_path, PROBE)
    assert len(said) == 2  # both are refused by the page's own policy
    assert asked == [address]
    free = text.replace("Content-Security-Policy", "X-Policy")
    _, said, _ = opened(browser, free, tmp_path, PROBE)
    assert "undefinedName is not defined" in " ".join(said)


@pytest.mark.parametrize("several", [False, True])
def test_evil_names_do_nothing(browser, runs, tmp_path, several):
    seen, *wrong = opened(browser, evil_page(runs)[several], tmp_path, EVIL_PROBE)
    assert wrong == [[], []]
    assert (seen.get("evil"), seen["handlers"]) == (None, [0, 0, 0, 0])
    # Nothing is cut off.
    assert (seen["last"], seen["scripts"], len(seen["footer"])) == ("SCRIPT", 1, 1)
    assert seen["plots"] == evil_page(runs)[several].count('class="plot"')
    shown = {printable(name) for name in EVIL}
    assert set(seen["bars"]) == set(seen["exemplars"]) == set(seen["tips"]) == shown
    assert {name if len(name) <= 22 else f"{name[:20]}…" for name in shown} <= set(seen["drawn"])
