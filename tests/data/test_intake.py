"""Folders inside class folders: series of images, or parts of a dataset."""

import pytest
from tests.helpers.pictures import tree

from geodl.core.errors import DataError
from geodl.data.intake import take


@pytest.mark.parametrize(
    ("folders", "parts"),
    [
        (["ant/v0", "ant/v1", "bee/v2"], False),
        (["train/express", "car/red"], False),  # vehicles
        (["ant", "bee/v0", "wasp/v0"], False),
        (["week1/ant", "week1/bee", "week2/ant"], True),
        (["Train/ant", "val/bee"], True),
        (["photos/ant", "photos/bee"], True),
    ],
)
def test_nested_folders_are_classes_unless_their_names_are_those_of_parts(tmp_path, folders, parts):
    root = tree(tmp_path / "data", {f"{each}/{i}.png": i for i, each in enumerate(folders)})
    outer = {each.split("/")[0] for each in folders}
    if parts:
        with pytest.raises(DataError, match=r"parts of a dataset.*--group-by folder"):
            take(root)
    else:
        assert set(take(root).classes) == outer
    assert set(take(root, series=True).classes) == outer
