"""The page in a real browser: plots are there, nothing is asked for from outside, no error, light and dark, wide and narrow."""

import html
import json
import re
import shutil
import subprocess

import pytest
from test_owner_report import models, odd, shown  # noqa: F401  # the fixtures
from test_report import EVIL, evil_page, render, runs, source  # noqa: F401  # the fixture

from geodl.core.text import printable

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--v=0",
    "--virtual-time-budget=3000",
    "--dump-dom",
]

# Runs inside the page, after its own script, and tells the frame around it what it saw.
PROBE = """
const seen = {errors: window.errors, blocked: window.blocked};
seen.asked = performance.getEntriesByType("resource").map((entry) => entry.name).filter((name) => !name.startsWith("data:"));
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
parent.postMessage(JSON.stringify(seen), "*");
"""
# The same, where classes have evil names.
EVIL_PROBE = """
const texts = (selector) => [...document.querySelectorAll(selector)].map((element) => element.textContent.trim());
const seen = {errors: window.errors, blocked: window.blocked, evil: window.evil, last: document.body.lastElementChild.tagName};
seen.footer = texts("footer");
seen.plots = document.querySelectorAll(".plot svg").length;
seen.scripts = document.querySelectorAll("script:not([type])").length;
seen.bars = texts(".tabs > article:first-of-type .bars span");
seen.exemplars = texts(".strips figcaption");
seen.drawn = texts(".plot[data-prefix*=confusion] text");
seen.tips = JSON.parse(document.querySelector(".plot[data-prefix*=confusion] script").textContent).heat.rows;
seen.handlers = ["onerror", "onmouseover", "onfocus", "autofocus"].map((name) => document.querySelectorAll(`[${name}]`).length);
parent.postMessage(JSON.stringify(seen), "*");
"""
# The page of a model.
OWNER_PROBE = """
const seen = {errors: window.errors, blocked: window.blocked, evil: window.evil, width: innerWidth};
seen.asked = performance.getEntriesByType("resource").map((entry) => entry.name).filter((name) => !name.startsWith("data:"));
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
parent.postMessage(JSON.stringify(seen), "*");
"""
# What was blocked is told a little later than what failed.
LATER = 'addEventListener("load", () => setTimeout(() => {%s}, 100));'
# No window is as narrow as a phone, but a frame is.
HOST = """<!doctype html><meta name="color-scheme" content="light dark"><body style="margin:0">
<script>addEventListener("message", (event) => { document.body.dataset.seen = event.data; });</script>
<iframe src="page.html" width="WIDTH" height="800" style="border:0"></iframe>"""
WATCH = """window.errors = []; window.blocked = [];
addEventListener("error", (event) => errors.push(event.message));
addEventListener("securitypolicyviolation", (event) => blocked.push(event.blockedURI));"""


def opened(text, tmp_path, *, width, dark=False, probe=PROBE, allowed=()):
    """Open a page and return what the probe saw, and what the browser wrote about it; only what the page allows runs."""
    probe = LATER % probe
    ours = "".join(f" '{source(script)}'" for script in (WATCH, probe, *allowed))
    text = text.replace("script-src", f"script-src{ours}", 1)
    text = text.replace("<style>", f"<script>{WATCH}</script><style>", 1)
    text = text.replace("</body></html>", f"<script>{probe}</script></body></html>")
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    host = tmp_path / "host.html"
    host.write_text(HOST.replace("WIDTH", str(width)), encoding="utf-8")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    command = [
        BROWSER,
        *FLAGS,
        f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1400,900",
        scheme,
    ]
    done = subprocess.run(
        [*command, host.as_uri()], capture_output=True, text=True, timeout=120, check=False
    )
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(found[1])) if found else None, said


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_page_of_a_run(runs, tmp_path, width, dark):  # noqa: F811
    seen, said = opened(render(runs, "geo-1"), tmp_path, width=width, dark=dark)
    assert said == []
    assert (seen["errors"], seen["blocked"], seen["asked"]) == ([], [], [])
    assert seen["width"] == width
    assert seen["overflow"] <= 0
    names = {plot["name"] for plot in seen["plots"] if plot["shown"]}
    angles = {"angles", "angles-training"}
    assert names == {
        "accuracy",
        "forgetting",
        "similarity",
        *angles,
        "groups-nme",
        "confusion-nme",
        "training",
    }
    assert all(
        plot["width"] > 200 and plot["height"] > 80 for plot in seen["plots"] if plot["shown"]
    )
    assert len(seen["images"]) == 6
    # Text stands out from the page, in both schemes.
    assert (
        (seen["page"] < 0.2 and seen["text"] > 0.5)
        if dark
        else (seen["page"] > 0.9 and seen["text"] < 0.5)
    )
    assert re.fullmatch(r"CNN\nclasses learned 3: [\d.]+ %", seen["point"])
    assert re.search(r"\ncorrect: \d \([\d.]+ %\)$", seen["cell"])
    assert seen["switched"] == ["none", "block", "none", "none"]


def test_a_large_matrix_can_be_enlarged(runs, tmp_path):  # noqa: F811
    seen, said = opened(render(runs, "cifar"), tmp_path, width=390)
    assert said == []
    assert (seen["errors"], seen["blocked"], seen["asked"]) == ([], [], [])
    assert seen["overflow"] <= 0
    assert seen["enlarged"] > 1500
    assert seen["heading"] < 1.5 * seen["name"]  # not as much larger as the rest
    assert seen["overflowEnlarged"] <= 0


def test_the_check_itself_notices_errors_and_requests(runs, tmp_path):  # noqa: F811
    bad = '<img src="https://example.invalid/x.png"><script>undefinedName.x</script><script>window.evil = 1</script></footer>'
    text = render(runs, "geo-1").replace("</footer>", bad)
    seen, said = opened(text, tmp_path, width=1280, allowed=["undefinedName.x"])
    assert len(said) == 3
    assert seen["errors"] == ["Uncaught ReferenceError: undefinedName is not defined"]
    assert sorted(seen["blocked"]) == ["https://example.invalid/x.png", "inline"]


@pytest.mark.parametrize("several", [False, True])
def test_evil_names_do_nothing(runs, tmp_path, several):  # noqa: F811
    seen, said = opened(evil_page(runs)[several], tmp_path, width=1280, probe=EVIL_PROBE)
    assert said == []
    assert (seen["errors"], seen["blocked"], seen.get("evil"), seen["handlers"]) == (
        [],
        [],
        None,
        [0, 0, 0, 0],
    )
    # Nothing is cut off.
    assert (seen["last"], seen["scripts"], len(seen["footer"])) == ("SCRIPT", 3, 1)
    assert seen["plots"] == evil_page(runs)[several].count('class="plot"')
    shown = {printable(name) for name in EVIL}
    assert set(seen["bars"]) == set(seen["exemplars"]) == set(seen["tips"]) == shown
    assert {name if len(name) <= 22 else f"{name[:20]}…" for name in shown} <= set(seen["drawn"])


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_page_of_a_model(models, tmp_path, width, dark):  # noqa: F811
    text = shown(models.trained.path, with_images=True)
    seen, said = opened(text, tmp_path, width=width, dark=dark, probe=OWNER_PROBE)
    assert said == []
    assert (seen["errors"], seen["blocked"], seen["asked"], seen["outside"]) == ([], [], [], [])
    assert seen["width"] == width
    assert seen["overflow"] <= 0
    assert seen["overflowOpen"] <= 0
    assert seen["score"] < 800  # on the first screen
    assert (
        (seen["page"] < 0.2 and seen["text"] > 0.5)
        if dark
        else (seen["page"] > 0.9 and seen["text"] < 0.5)
    )
    assert (seen["research"], seen["printed"]) == (False, False)
    assert len(seen["pictures"]) == text.count("<figcaption><b>") > 0
    assert all(side > 100 for side in seen["pictures"])
    assert seen["plots"] > 1


def test_odd_names_keep_inside_a_phone(odd, tmp_path):  # noqa: F811
    seen, said = opened(odd[1], tmp_path, width=390, probe=OWNER_PROBE)
    assert said == []
    assert (seen["errors"], seen["blocked"], seen.get("evil"), seen["outside"]) == (
        [],
        [],
        None,
        [],
    )
    assert seen["overflow"] <= 0
