"""Pages in a real browser: what goes wrong in one, and what it asks for."""

import shutil

import pytest

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
]
NAMED = "button, input:not([hidden]), select, img, ul, ol, table, dialog, progress, a"
# Whatever a screen reader would find nameless; the picture of a button that has a name needs none.
NAMELESS = f"""() => [...document.querySelectorAll("{NAMED}")]
  .filter((each) => each.checkVisibility() && !each.closest("details"))
  .filter((each) => !(each.ariaLabel || each.textContent.trim() || each.alt || each.labels?.length))
  .filter((each) => !(each.getAttribute("aria-labelledby") || (each.tagName === "IMG" && each.closest("button")?.ariaLabel)))
  .map((each) => each.outerHTML)"""
# Buttons whose name lacks the words that they show, so that who speaks these does not press them.
MISNAMED = """() => [...document.querySelectorAll("button")]
  .filter((each) => each.checkVisibility() && each.ariaLabel && /[a-z0-9]/i.test(each.innerText))
  .filter((each) => !each.ariaLabel.toLowerCase().includes(each.innerText.replace(/\\s+/g, " ").trim().toLowerCase()))
  .map((each) => [each.innerText, each.ariaLabel])"""
# Whatever a finger might miss, [width, height, element].
SMALL = """() => [...document.querySelectorAll("button, input:not([hidden]):not([type=checkbox]), select, a, label")]
  .filter((each) => each.checkVisibility() && !each.closest(".skip, .visually-hidden"))
  .map((each) => [each.getBoundingClientRect(), each])
  .filter(([box]) => box.width && (box.width < 43.9 || box.height < 43.9))
  .map(([box, each]) => [box.width, box.height, each.outerHTML])"""


def until(page, condition):
    """Wait until a condition holds; the page's own policy forbids the browser to evaluate text, so it is asked from outside."""
    for _ in range(600):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"it did not come to that: {condition}")


def launched():
    """Yield a browser; the test is skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if BROWSER is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield browser
        browser.close()


def opened(browser, text, folder, probe, *, width=1280, dark=False):
    """Open a page as a file; return what a script sees in it, what went wrong, and what was asked for from outside."""
    path = folder / "page.html"
    path.write_text(text, encoding="utf-8")
    said, asked = [], []
    look = {"viewport": {"width": width, "height": 800}}
    with browser.new_context(color_scheme="dark" if dark else "light", **look) as context:
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        seen = page.evaluate(probe)
    own = ("data:", path.as_uri())
    return seen, said, [url for url in asked if not url.startswith(own)]
