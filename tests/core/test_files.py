"""Atomic writes, reads of regular files only, and links."""

import errno
import os
import stat
from pathlib import Path

import pytest
from tests.helpers.directories import Killed, put_odd

from geodl.core import files
from geodl.core.content import read_json, read_sealed
from geodl.core.errors import StoreError
from geodl.core.files import atomic_write, make_below, make_directory, read_file

STEPS_OF_A_WRITE = ["created", "written", "synced", "renamed", "settled"]


def refuse(*arguments, **options):
    raise OSError(errno.EROFS, "Read-only file system")


@pytest.mark.parametrize("step", STEPS_OF_A_WRITE)
@pytest.mark.parametrize("failure", [Killed(), OSError(errno.ENOSPC, "No space left on device")])
def test_an_interrupted_write_leaves_the_old_or_the_new_content(
    tmp_path, monkeypatch, step, failure
):
    def crash(name, path):
        if name == step:
            raise failure

    path = tmp_path / "file"
    atomic_write(path, b"old content")
    monkeypatch.setattr(files, "crash_point", crash)
    with pytest.raises((Killed, StoreError)) as caught:
        atomic_write(path, b"new content")
    assert path.read_bytes().startswith(b"new" if step in ("renamed", "settled") else b"old")
    if isinstance(failure, OSError):
        full = r"cannot write .*file \(what was there before is kept\): the disk is full"
        assert caught.match(full)
        assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_failing_fsync_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StoreError, match="Read-only"):
        atomic_write(tmp_path / "file", b"content")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "link to a device"])
def test_a_pipe_or_a_device_is_not_replaced(tmp_path, kind):
    path = tmp_path / "file"
    os.mkfifo(tmp_path / "pipe")
    path.symlink_to("/dev/null" if "device" in kind else tmp_path / "pipe")
    path = tmp_path / "pipe" if kind == "pipe" else path
    before = path.lstat()
    with pytest.raises(StoreError, match="no file replaces it"):
        atomic_write(path, b"content")
    assert os.path.samestat(path.lstat(), before)
    assert Path("/dev/null").is_char_device()


def test_files_have_the_permissions_of_ordinary_files(tmp_path):
    (tmp_path / "ordinary").write_bytes(b"")
    atomic_write(tmp_path / "file", b"")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_a_disk_that_allows_nothing_is_one_error(tmp_path, monkeypatch):
    (tmp_path / f"{files.TEMPORARY}x").touch()
    for method in ("open", "unlink", "mkdir", "replace"):
        monkeypatch.setattr(type(tmp_path), method, refuse)
    for write in (
        lambda: atomic_write(tmp_path / "x", b""),
        lambda: make_directory(tmp_path / "d"),
        lambda: files.remove_temporaries(tmp_path),
    ):
        with pytest.raises(StoreError, match=r"cannot write .*: Read-only file system$"):
            write()


# -- reads


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "kind", ["pipe", "folder", "socket", "/dev/zero", "/dev/null", "/dev", "odd", "nothing"]
)
def test_only_regular_files_are_read(tmp_path, kind):
    path = tmp_path / "odd"
    put_odd(path, kind)
    for read in (read_file, read_json, read_sealed):
        expected = r"odd is not a regular file$|cannot read .*odd: [A-Z][\w ]+$"
        with pytest.raises(StoreError, match=expected):
            read(path)


def test_a_link_to_a_regular_file_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_file(tmp_path / "link") == b"content"


def test_sizes_are_checked_before_reading(tmp_path):
    path = tmp_path / "huge"
    path.write_bytes(b"")
    os.truncate(path, 2**42)
    with pytest.raises(StoreError, match=r"huge is too large: 4398\.0 GB, where at most 67\.1 MB"):
        read_json(path)
    with pytest.raises(StoreError, match="huge is damaged: it has 4398046511104 bytes"):
        read_file(path, size=8)
    with pytest.raises(StoreError, match=r"4398\.0 GB do not fit into the memory"):
        read_file(path)


def test_a_failing_read_names_the_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"content")

    def unreadable(path):
        return path.open("ab")  # a file that cannot be read from

    monkeypatch.setattr(files, "open_regular", unreadable)
    with pytest.raises(StoreError, match=r"cannot read .*file: read"):
        read_file(path)


# -- links


def test_folders_are_not_made_through_a_link(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "named").symlink_to("outside")  # the directory that the user names may be a link
    assert make_below(tmp_path / "named", "a", "b") == tmp_path / "named" / "a" / "b"
    assert (tmp_path / "outside" / "a" / "b").is_dir()
    (tmp_path / "outside" / "link").symlink_to(tmp_path)
    (tmp_path / "outside" / "file").write_text("")
    for name in ("link", "file"):
        with pytest.raises(StoreError, match=f"{name} is a link or a file where geodl keeps"):
            make_below(tmp_path / "named", name, "b")
    assert not (tmp_path / "b").exists()


def test_leftovers_behind_a_link_are_kept(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / f"{files.TEMPORARY}x").write_text("mine")
    (tmp_path / "link").symlink_to(outside)
    files.remove_temporaries(tmp_path / "link")
    assert [path.name for path in outside.iterdir()] == [f"{files.TEMPORARY}x"]
    files.remove_temporaries(outside)
    assert not list(outside.iterdir())
