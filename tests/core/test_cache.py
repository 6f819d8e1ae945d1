"""The cache: entries by key, damage, locks, links, and disks that fail."""

import errno
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tests.helpers.command import completed

from geodl.core import files
from geodl.core.cache import Cache
from geodl.core.content import fingerprint

KEY = fingerprint({"data": "digits", "seed": 0, "classes": [3, 1]})
TENSORS = {"w": torch.arange(4.0)}


def test_entries_are_found_by_their_key(tmp_path):
    cache = Cache(tmp_path)
    assert cache.load(KEY) is None
    assert cache.size() == 0
    assert cache.put(KEY, TENSORS)
    loaded = Cache(tmp_path).load(KEY)
    assert loaded is not None
    assert torch.equal(loaded["w"], TENSORS["w"])
    assert cache.load(fingerprint("other")) is None


def test_a_damaged_entry_is_dropped_and_can_be_put_again(tmp_path):
    cache = Cache(tmp_path)
    cache.put(KEY, TENSORS)
    (path,) = (tmp_path / "entries").iterdir()
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    assert cache.load(KEY) is None
    assert not path.exists()
    cache.put(KEY, TENSORS)
    assert path.exists()


def test_clear_removes_all_entries_and_nothing_else(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    cache = Cache(tmp_path)
    cache.put(KEY, TENSORS)
    cache.put(fingerprint("other"), TENSORS)
    expected = sum(path.stat().st_size for path in (tmp_path / "entries").iterdir()) + 5
    (tmp_path / "entries" / f"{files.TEMPORARY}left-by-a-kill").write_bytes(b"12345")
    assert cache.size() == expected
    assert cache.clear() == expected
    assert cache.size() == 0
    assert cache.load(KEY) is None
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_full_disk_is_no_error_and_keeps_the_old_entry(tmp_path, monkeypatch):
    cache = Cache(tmp_path)
    cache.put(KEY, TENSORS)
    size = cache.size()

    def full(step, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "crash_point", full)
    assert not cache.put(KEY, {"w": torch.zeros(100)})
    assert cache.size() == size
    assert torch.equal(cache.load(KEY)["w"], TENSORS["w"])


def test_a_cache_that_cannot_be_made_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file")
    assert not cache.put(KEY, TENSORS)
    assert cache.load(KEY) is None
    assert cache.claim(KEY, ExitStack()), "without locks there is no reason to wait"
    assert cache.clear() == 0


def test_nothing_is_written_or_removed_behind_a_link(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / f"{KEY}.safetensors").write_text("mine")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "entries").symlink_to(outside)
    cache = Cache(tmp_path / "cache")
    with ExitStack() as held:
        assert cache.claim(KEY, held)
        assert not cache.put(KEY, TENSORS)
        assert cache.load(KEY) is None
        assert cache.clear() == cache.size() == 0
    assert [path.name for path in outside.iterdir()] == [f"{KEY}.safetensors"]
    assert (outside / f"{KEY}.safetensors").read_text() == "mine"


@pytest.mark.parametrize(("name", "mode"), [("", 0o777), ("entries", 0o777), ("entries", 0o1777)])
def test_a_cache_that_others_can_write_is_not_used(tmp_path, name, mode, caplog):
    cache = Cache(tmp_path / "cache")
    assert cache.put(KEY, TENSORS)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700, "it is made for its user alone"
    folder = tmp_path / "cache" / name
    folder.chmod(mode)
    assert cache.load(KEY) is None
    assert not cache.put(KEY, TENSORS)
    assert "can be written by other users" in caplog.text
    folder.chmod(0o755)
    (tmp_path / "cache").chmod(0o1777)  # as /tmp is
    assert cache.load(KEY) is not None


def test_one_process_makes_an_entry_and_a_claim_ends_with_its_process(tmp_path):
    cache, held = Cache(tmp_path), ExitStack()
    assert cache.claim(KEY, held)
    code = (
        "import sys; from contextlib import ExitStack; from pathlib import Path\n"
        "from geodl.core.cache import Cache\n"
        "sys.exit(Cache(Path(sys.argv[1])).claim(sys.argv[2], ExitStack()))"
    )
    completed(tmp_path, KEY, code=code, status=False)
    with ExitStack() as more:
        assert cache.claim("other", more)
    held.close()
    completed(tmp_path, KEY, code=code, status=True)
    assert cache.claim(KEY, held)
    held.close()


@pytest.mark.parametrize(
    ("geodl", "xdg", "expected"),
    [
        ("/own", "/xdg", "/own"),
        (None, "/xdg", "/xdg/geodl"),
        (None, None, "HOME/.cache/geodl"),
        ("", "", "HOME/.cache/geodl"),
        (None, "relative", "HOME/.cache/geodl"),  # the XDG standard: relative paths are ignored
    ],
)
def test_where_the_cache_lives(tmp_path, monkeypatch, geodl, xdg, expected):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in (("GEODL_CACHE", geodl), ("XDG_CACHE_HOME", xdg)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert Cache().root == Path(expected.replace("HOME", str(tmp_path)))
