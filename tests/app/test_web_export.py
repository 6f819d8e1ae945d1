"""`geodl export --format web`: in a real browser the page resizes as Pillow does, and predicts as the model does."""

import functools
import http.server
import io
import json
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.helpers.pictures import drawing, encode, noise

from geodl.app.classifier import IncrementalClassifier
from geodl.app.web import export as web
from geodl.core.decoding import letterboxed
from geodl.core.errors import ConfigError, GeodlError

pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@contextmanager
def opened(browser, folder, **how):
    """Serve a folder on this machine and open its page; nothing may go wrong in it, or come from elsewhere."""
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        own, said, asked = f"http://127.0.0.1:{server.server_port}/", [], []
        with browser.new_context(**how) as context:
            page = context.new_page()
            page.on("console", lambda message: said.append(message.text))
            page.on("pageerror", lambda error: said.append(str(error)))
            page.on("request", lambda request: asked.append(request.url))
            page.goto(own)
            yield page
        server.shutdown()
        thread.join()
    assert said == []
    assert all(url.startswith((own, f"blob:{own}", "data:")) for url in asked)


@pytest.fixture(scope="session")
def runtime(pytestconfig):
    """The files of onnxruntime-web, fetched once for all runs of the tests."""
    folder = Path(pytestconfig.cache.mkdir("onnxruntime-web"))
    if not all((folder / name).is_file() for name in web.RUNTIME):
        try:
            found = web.fetched()
        except GeodlError as error:
            pytest.skip(str(error))
        for name, content in found.items():
            (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory, runtime):
    root = tmp_path_factory.mktemp("web")
    for kind in ("disc", "square"):
        (root / "shapes" / kind).mkdir(parents=True)
        for seed in range(12):
            drawing(kind, seed).save(root / "shapes" / kind / f"{seed}.png")
    model = IncrementalClassifier(root / "drawn shapes")
    how = {"method": "analytic", "network": "resnet8", "image_size": 32, "threads": 1}
    model.learn(root / "shapes", **how)
    model.export_web(root / "page", runtime=runtime)
    return model, root / "page"


@pytest.fixture(scope="module")
def page(browser, made):
    with opened(browser, made[1], permissions=["camera"]) as page:
        yield page


@pytest.mark.parametrize(
    ("size", "tolerance"),
    [((90, 70), 0), ((201, 84), 0), ((56, 56), 0), ((5, 4), 0), ((71, 200), 1)],
)
def test_the_page_resizes_as_pillow_does(page, size, tolerance):
    """Exactly; Pillow 13 takes the columns of tall images first, which changes a value by 1 at most."""
    image = Image.fromarray(noise(*reversed(size), 3, seed=size[0]))
    script = """async ([data, width, height, sizes]) => {
      const { seen } = await import("./resize.js");
      return sizes.map(([shorter, size, whole]) => [...seen({ data, width, height, step: 3 }, shorter, size, whole)]);
    }"""
    sizes = [(32, 32, False), (37, 32, False), (64, 56, False), (33, 33, True)]
    found = page.evaluate(script, [list(image.tobytes()), *size, sizes])
    for (shorter, side, whole), values in zip(sizes, found, strict=True):
        wanted = center(center(image, min(size), shorter), side, side)
        wanted = letterboxed(image, side) if whole else wanted
        values = np.array(values).reshape(3, side, side).transpose(1, 2, 0)
        assert np.abs(values - np.asarray(wanted, dtype=int)).max() <= tolerance


def center(image, side, size):
    """Return the center square with this side, at another size."""
    left, top = (image.width - side) / 2, (image.height - side) / 2
    box = (left, top, left + side, top + side)
    return image.resize((size, size), Image.Resampling.BILINEAR, box=box)


def recognized(page, files):
    """Return {name: (nearest class, confidence, answer)} of what the page makes of files."""
    kind = {"mimeType": "image/png"}
    given = [{"name": name, "buffer": content} | kind for name, content in files.items()]
    page.set_input_files("#file", given)
    page.locator(f"#results li[data-name]:nth-of-type({len(files)})").wait_for(timeout=600_000)
    items = page.locator("#results > li")
    read = "all => all.map(({dataset: d}) => [d.name, d.nearest, +d.confidence, d.label])"
    return {name: rest for name, *rest in items.evaluate_all(read)}


def compare(model, found, files, tolerance):
    assert set(found) == set(files)
    for name, content in files.items():
        image = Image.open(io.BytesIO(content))
        (wanted,) = model.predict([image])
        nearest, confidence, label = found[name]
        assert nearest == wanted.top[0][0], name
        assert confidence == pytest.approx(wanted.confidence, abs=tolerance), name
        assert label == wanted.label, name


def test_the_page_predicts_what_the_model_predicts(made, page):
    model, folder = made
    kinds = ("disc", "square")
    files = {f"{kind} {i}": encode(drawing(kind, 100 + i)) for kind in kinds for i in range(4)}
    clear = drawing("disc", 5).convert("RGBA")
    clear.putalpha(Image.fromarray(noise(70, 90)))
    files["transparent"] = encode(clear)
    about = json.loads((folder / "model.json").read_text())
    assert (about["name"], about["labels"]) == ("drawn shapes", ["disc", "square"])
    compare(model, recognized(page, files), files, 0.01)
    page.set_input_files("#file", [{"name": "x", "mimeType": "image/png", "buffer": b"broken"}])
    page.get_by_text("cannot read the image").wait_for()
    page.get_by_role("button", name="Camera").click()
    page.locator("#now .bars li").first.wait_for()
    page.get_by_role("button", name="Stop the camera").click()
    assert not page.locator("#live").is_visible()


def test_what_cannot_be_exported_is_named(made, runtime, tmp_path, monkeypatch):
    model, folder = made
    with pytest.raises(ConfigError, match="not empty; --force"):
        model.export_web(folder, runtime=runtime)
    with pytest.raises(ConfigError, match="onnxruntime-web are needed"):
        model.export_web(tmp_path / "new", runtime=tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"npm .* --runtime DIR"):
        model.export_web(tmp_path / "other")


@pytest.mark.slow
def test_photographs_are_recognized_alike(browser, flowers, runtime, tmp_path):
    """100 photographs, as they are (JPEG) and without loss (PNG)."""
    model = IncrementalClassifier(tmp_path / "flowers")
    model.learn(flowers / "week1")
    model.export_web(tmp_path / "page", runtime=runtime)
    some = sorted((flowers / "test").rglob("*.jpg"))[::3][:100]
    photos = {f"{i} {path.name}": path.read_bytes() for i, path in enumerate(some)}
    lossless = {name: encode(Image.open(io.BytesIO(each))) for name, each in photos.items()}
    assert len(photos) == 100
    for files, tolerance in ((lossless, 0.01), (photos, 0.03)):
        with opened(browser, tmp_path / "page") as page:
            compare(model, recognized(page, files), files, tolerance)
