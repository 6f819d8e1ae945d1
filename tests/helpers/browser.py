"""The page of a server in a real browser."""

import shutil

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
