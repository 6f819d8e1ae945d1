"""Every method with every distillation on a tiny generated set, and the ImageNet presets on a generated folder."""

import numpy as np
import pytest
from PIL import Image
from tests.helpers import tiny
from tests.helpers.directories import saved

from geodl.bench.experiment import results_of, run_config
from geodl.config import Layer, preset_layer
from geodl.core.cache import Cache
from geodl.core.errors import ConfigError
from geodl.losses import DISTILLATIONS
from geodl.methods import METHODS, configure

SHORT = {
    "bic": {"correction_epochs": 30},
    "mnemonics": {"outer_steps": 2},
    "analytic": {"expansion": 256},
}
# Its head learns in phase 0 alone, and so do the features of k-NME.
READ = {"analytic": ("analytic",)}

# Six classes: by chance one image in six is right. With a memory, the accuracy on the classes of the first two groups must
# exceed that by this many points after the last phase, under both classifiers of a learner.
CHANCE, MARGIN = 100 / 6, 50.0


@pytest.fixture(scope="module")
def data():
    return tiny.dataset(6, train=16, test=10)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return Cache(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("distill", ["none", *DISTILLATIONS])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_with_every_distillation_keeps_the_old_classes(
    tmp_path, data, cache, method, distill
):
    options = {"method": method, "distill": distill, "exemplars": 4, "batch_size": 16}
    options |= {"epochs": 7, "base_epochs": 10, "base": 2, "phases": 2, "padding": 0}
    options |= {"schedule": "onecycle", "lr": 0.05, "base_lr": 0.05}
    if method in ("joint", "analytic") and distill != "none":
        with pytest.raises(ConfigError, match=f"distill = '{distill}'"):
            tiny.config(**options)
        return
    config = tiny.config(**options, analysis=False, **SHORT.get(method, {}))
    results = results_of(run_config(config, out=tmp_path / "r", data=data, cache=cache))
    for classifier in READ.get(method, ("cnn", "nme")):
        old = np.mean([results[classifier].matrix[group][2] for group in (0, 1)])
        assert old >= CHANCE + MARGIN, f"{classifier}: {old:.1f} % of the old classes' images"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder of 12 classes with pictures of many sizes in train/ and val/, each class in its own color."""
    root = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for c in range(12):
        color = rng.integers(40, 216, 3)
        for part, count in (("train", 5), ("val", 2)):
            place = root / part / f"n{c:08d}"
            place.mkdir(parents=True)
            for i in range(count):
                noise = rng.integers(-30, 30, (30 + 3 * i, 66 - 2 * c, 3))
                Image.fromarray((color + noise).astype(np.uint8)).save(place / f"{i}.jpg")
    return root


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("imagenet", {"method": "mnemonics", "outer_steps": 1}),
        ("imagenet-subset", {"method": "bic", "correction_epochs": 3}),
    ],
)
def test_imagenet_presets_run_end_to_end_on_a_folder(tmp_path, folder, preset, options):
    # The preset except for sizes: another source, 12 classes, small pictures, a small network, one epoch.
    small = {"data": "folder", "data_dir": folder, "base": 8, "phases": 2, "image_size": 28}
    small |= {"epochs": 1, "exemplars": 3, "threads": 1, "batch_size": 16, "network": "resnet8"}
    config = configure([preset_layer(preset), Layer("test", small | options)]).config
    assert config.crop == "resized"
    store = run_config(config, out=tmp_path / "r")
    assert store.completed() == 3
    last = saved(store, 2)
    assert set(last.metrics["accuracy"]) == {"cnn", "nme", "ame", "ncm"}
    assert all(tensor.isfinite().all() for tensor in last.model.values())
