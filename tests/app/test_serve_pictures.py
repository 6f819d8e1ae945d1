"""The kept pictures of a model over HTTP and on the page: doubtful ones come first, and are moved or forgotten."""

import shutil

import pytest
from tests.helpers.browser import BROWSER, MISNAMED, NAMELESS, SMALL, until
from tests.helpers.serving import Client, pictures, running

from geodl.app.classifier import IncrementalClassifier

KINDS = {0: "zero", 1: "one", 3: "three"}
PICTURES = "/api/v1/pictures"
HOW = {"method": "analytic", "network": "resnet8", "threads": 1, "group_by": "none"}


@pytest.fixture(scope="module")
def taught(tmp_path_factory, digits):
    """A model in closed form of three digits; zero/9.png is a one."""
    root = tmp_path_factory.mktemp("taught")
    for label, kind in KINDS.items():
        (root / "images" / kind).mkdir(parents=True)
        for i, content in enumerate(pictures(digits, label, slice(15))):
            (root / "images" / kind / f"{i}.png").write_bytes(content)
    (wrong,) = pictures(digits, 1, slice(40, 41))
    (root / "images" / "zero" / "9.png").write_bytes(wrong)
    IncrementalClassifier(root / "model").learn(root / "images", **HOW)
    return root / "model"


@pytest.fixture
def numbers(taught, tmp_path):
    return shutil.copytree(taught, tmp_path / "numbers")


@pytest.fixture
def served(numbers):
    with running(numbers) as url, Client(url) as client:
        yield client


def test_doubtful_pictures_come_first(served):
    first, *others = served.get(PICTURES).json()
    assert (first["name"], first["label"], first["likely"]) == ("zero/9.png", "zero", "one")
    assert 0.9 < first["confidence"] <= 1
    assert {each["likely"] for each in others} == {None}
    labels = [each["label"] for each in others]
    assert labels == sorted(labels, key=served.names().index)  # by class
    shown = served.get(f"{PICTURES}/{first['id']}").json()["image"]
    assert shown.startswith("data:image/webp;base64,")
    assert served.get(f"{PICTURES}/none").status_code == 422


def test_a_picture_is_moved_confirmed_and_forgotten(served):
    def counts(model):
        return {each["name"]: each["images"] for each in model["classes"]}

    key = served.get(PICTURES).json()[0]["id"]
    model = served.post(f"{PICTURES}/move", json={"ids": [key], "label": "one"}).json()
    assert counts(model) == {"zero": 14, "one": 16, "three": 15}
    moved = {each["id"]: each for each in served.get(PICTURES).json()}[key]
    assert (moved["label"], moved["likely"]) == ("one", None)
    model = served.post(f"{PICTURES}/forget", json={"ids": [key]}).json()
    assert counts(model) == {"zero": 14, "one": 15, "three": 15}
    assert key not in [each["id"] for each in served.get(PICTURES).json()]
    undone = [served.post("/api/v1/undo").json()["record"] for _ in range(2)]
    about = {"images": 1, "image": "zero/9.png"}
    assert undone[0] == {"action": "forget", **about}
    assert undone[1] == {"action": "relabel", "old": "zero", "new": "one", **about}
    assert served.get(PICTURES).json()[0]["id"] == key
    model = served.post(f"{PICTURES}/move", json={"ids": [key], "label": "zero"}).json()
    assert [each["action"] for each in model["steps"]] == ["learn", "confirm"]
    assert {each["likely"] for each in served.get(PICTURES).json()} == {None}
    refused = served.post(f"{PICTURES}/move", json={"ids": [key], "label": "no such class"})
    assert refused.status_code == 422


def test_accuracy_has_an_interval_and_mistakes_a_matrix(served):
    model = served.get("/api/v1/model").json()
    assert model["left_out"]
    assert model["mendable"]
    for i, known in enumerate(model["classes"]):
        mine = {column: number for row, column, number in model["matrix"] if row == i}
        assert known["judged"] == sum(mine.values()) == 15
        assert known["accuracy"] == pytest.approx(100 * mine.get(i, 0) / 15)
        low, high = known["interval"]
        assert low < known["accuracy"] <= high


def test_the_name_of_an_image_is_private_and_deleted_once_its_step_cannot_be_undone(served):
    key = served.get(PICTURES).json()[0]["id"]
    steps = served.post(f"{PICTURES}/move", json={"ids": [key], "label": "one"}).json()["steps"]
    assert steps[-1]["image"] == "zero/9.png"
    with Client(served.url, token=None) as stranger:
        assert "image" not in stranger.get("/api/v1/model").json()["steps"][-1]
        assert "image" not in stranger.get("/api/v1/history").json()[-1]
    for old, new in (("three", "3"), ("3", "drei"), ("drei", "three")):
        served.post("/api/v1/classes/rename", json={"old": old, "new": new})
    moved = served.get("/api/v1/history").json()[1]
    assert (moved["action"], "image" in moved) == ("relabel", False)


def test_a_trained_model_shows_its_pictures_but_changes_none(client):
    assert not client.get("/api/v1/model").json()["mendable"]
    found = client.get(PICTURES).json()
    assert {each["use"] for each in found} == {"exemplar", "validation"}
    assert {each["likely"] for each in found} == {None}
    refused = client.post(f"{PICTURES}/forget", json={"ids": [found[0]["id"]]})
    assert refused.status_code == 422
    assert client.get(f"{PICTURES}/{found[-1]['id']}").status_code == 200


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_pictures_are_moved_confirmed_and_forgotten_by_one_click(numbers, opened):
    with running(numbers) as url, opened(url) as page:
        odd = page.locator("#doubtful li")
        odd.first.wait_for()
        until(page, "document.querySelector('#doubtful img').naturalWidth > 0")
        assert "zero looks like one (9" in odd.inner_text()
        assert page.evaluate(NAMELESS) == []
        assert page.locator("#matrix tbody tr").count() == 3
        page.get_by_role("button", name="Move to one: zero/9.png").focus()
        page.keyboard.press("Enter")
        page.get_by_text("Moved zero/9.png from zero to one").wait_for()
        page.locator("#mended", has_text="Moved zero/9.png to one. Undo takes it back.").wait_for()
        page.locator("#undo").click()
        page.get_by_text("Undone: Moved zero/9.png from zero to one").wait_for()
        page.get_by_role("button", name="Forget zero/9.png").click()
        page.locator("#steps").get_by_text("Forgot zero/9.png").wait_for()
        assert page.locator("#reverted").inner_text() == ""
        page.locator("#undo").click()
        page.get_by_role("button", name="Keep zero/9.png as zero").click()
        page.get_by_text("Confirmed zero/9.png as zero").wait_for()
        assert not page.locator("#doubts").is_visible()
        # any picture, by its class
        page.get_by_role("button", name="all pictures of three").click()
        assert page.locator(".strip[data-name=three] .pic").count() == 11
        page.get_by_role("button", name="three, three/3.png").click()
        assert page.evaluate(NAMELESS) == []
        page.locator("#picture-class").select_option("one")
        page.get_by_role("button", name="Move", exact=True).click()
        page.get_by_text("Moved three/3.png from three to one").wait_for()
        until(page, "document.querySelectorAll('.strip[data-name=three] .pic').length === 10")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_doubtful_image_without_a_kept_picture_is_named(taught, tmp_path, opened):
    IncrementalClassifier(tmp_path / "numbers").learn(taught.parent / "images", exemplars=0, **HOW)
    with running(tmp_path / "numbers") as url, opened(url) as page:
        assert page.locator("#doubtful li").inner_text().split("\n")[0] == "Not kept"
        page.get_by_role("button", name="zero/9.png, no picture kept").click()
        assert "no picture of it" in page.locator("#picture-remarks").inner_text()
        assert not page.locator("#picture-image").is_visible()


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_controls_are_large_enough_on_a_phone(numbers, opened, digits, scheme):
    how = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    with running(numbers) as url, opened(url, color_scheme=scheme, **how) as page:
        page.locator("#doubtful li").first.wait_for()
        (some,) = pictures(digits, 4, slice(1))
        image = {"name": "four.png", "mimeType": "image/png", "buffer": some}
        page.set_input_files("#file", image)
        page.wait_for_selector(".results .bars")
        page.locator(".fix input").fill("four")
        page.get_by_role("button", name="Correct").click()
        page.wait_for_selector(".thumbs li")
        assert page.evaluate(SMALL) == []
        assert page.evaluate(MISNAMED) == []
        page.locator(".strip .pic").first.click()
        assert page.evaluate(SMALL) == []
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Rename zero").click()
        assert page.evaluate(SMALL) == []
        page.keyboard.press("Escape")
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        page.goto(f"{url}/docs")
        assert page.evaluate(SMALL) == []
