"""Labelled images from one file: zip archives and tables."""

import os
import zipfile

import pytest
from tests.helpers.pictures import png, tree

from geodl.core.errors import DataError
from geodl.data import listing
from geodl.data.intake import take

FILES = {"cat/1.png": 1, "cat/2.png": 2, "dog/3.png": 3, "dog/deep/4.png": 4}


def zipped(path, files, inside=""):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(inside + name, png(content) if isinstance(content, int) else content)
    return path


@pytest.mark.parametrize("inside", ["", "photos/"])
def test_an_archive_is_read_like_a_folder(tmp_path, inside):
    files = FILES | {"README.txt": b"about", "5.png": 5}
    if inside:  # an image beside the class folders would make their folder a class
        del files["5.png"]
    odd = {".DS_Store": b"x", "cat/.hidden.png": b"x", "__MACOSX/cat/1.png": b"x"}
    file = zipped(tmp_path / "photos.zip", files | odd, inside)
    found, folder = take(file), take(tree(tmp_path / "photos", files))
    assert (found.classes, found.key, found.names) == (folder.classes, folder.key, folder.names)
    reasons = {name.removeprefix(inside): reason for name, reason in found.problems}
    assert reasons == dict(folder.problems)
    assert reasons["README.txt"] == "not inside a class folder"
    with pytest.raises(DataError, match=r"README\.txt: not inside a class folder"):
        take(zipped(tmp_path / "strict.zip", FILES | {"README.txt": b"about"}, inside), strict=True)


def table(path, text, **files):
    tree(path.parent, FILES | files)
    path.write_text(text, encoding="utf-8-sig")
    return path


@pytest.mark.parametrize("sign", [",", ";", "\t"])
@pytest.mark.parametrize("head", ["file, label\n", ""])
def test_a_table_of_files_and_labels(tmp_path, sign, head):
    text = head + 'dog/3.png, 10\n"cat/1.png" , "9" \n , \n\n cat/2.png,9\nnowhere.png,9\n'
    found = take(table(tmp_path / "labels.csv", text.replace(",", sign)))
    assert found.classes == ("9", "10")
    assert found.images.labels.tolist() == [1, 0, 0]
    assert found.names == ("dog/3.png", "cat/1.png", "cat/2.png")
    assert found.problems == (("nowhere.png", "the file is missing"),)
    with pytest.raises(DataError, match=r"nowhere\.png: the file is missing"):
        take(tmp_path / "labels.csv", strict=True)


@pytest.mark.parametrize("kind", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_damaged_compression_is_refused_in_one_line(tmp_path, kind):
    path = tmp_path / "odd.zip"
    with zipfile.ZipFile(path, "w", kind) as archive:
        archive.writestr("cat/1.png", png(1))
        start = archive.getinfo("cat/1.png").compress_size // 2
    content = bytearray(path.read_bytes())
    content[start : start + 30] = b"\xff" * 30
    path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be read"):
        take(path)


@pytest.mark.timeout(60)
def test_unusable_files_are_named(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe.png")
    os.mkfifo(tmp_path / "pipe.zip")
    (tmp_path / "bad.zip").write_bytes(b"PK")
    zipped(tmp_path / "flat.zip", {"1.png": 1})
    zipped(tmp_path / "texts.zip", {"a/1.txt": b"x"})
    table(tmp_path / "short.csv", "cat/1.png\n")
    table(tmp_path / "pipe.csv", "pipe.png,cat\n")
    for name, words in (
        ("nowhere.zip", "nowhere"),
        ("bad.zip", "cannot be read"),
        ("pipe.zip", "not a regular file"),
        ("flat.zip", "first: 1.png: not inside a class folder"),
        ("texts.zip", "no images with labels found .first: a/1.txt: not an image"),
        ("short.csv", "has no label"),
        ("pipe.csv", "pipe.png: not a regular file"),
    ):
        with pytest.raises(Exception, match=words) as caught:
            take(tmp_path / name)
        assert isinstance(caught.value, DataError), name
    monkeypatch.setattr(listing, "LARGEST", 10)
    with pytest.raises(DataError, match="unpack it"):
        take(zipped(tmp_path / "huge.zip", FILES))
