"""Atomic files: old or new after every fault, equal bytes for equal values, damage found, only regular files read."""

import errno
import os
import stat
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.directories import Killed, put_odd

from geodl.core import files
from geodl.core.errors import StoreError
from geodl.core.files import (
    atomic_write,
    interpreting,
    make_below,
    make_directory,
    read_file,
    read_json,
    read_sealed,
    signed,
    verified,
    write_json,
    write_own,
    write_sealed,
)
from geodl.core.tensors import parse_tensors, tensor_file

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
]
STEPS_OF_A_WRITE = ["created", "written", "synced", "renamed", "settled"]


def fail_at(monkeypatch, step, failure):
    def crash(name, path):
        if name == step:
            raise failure

    monkeypatch.setattr(files, "crash_point", crash)


@pytest.mark.parametrize("step", STEPS_OF_A_WRITE)
def test_a_killed_write_leaves_the_old_or_the_new_content(tmp_path, monkeypatch, step):
    path = tmp_path / "file"
    atomic_write(path, b"old content")
    fail_at(monkeypatch, step, Killed())
    with pytest.raises(Killed):
        atomic_write(path, b"new content")
    assert path.read_bytes() == (
        b"new content" if step in ("renamed", "settled") else b"old content"
    )


@pytest.mark.parametrize("step", ["created", "written", "synced"])
def test_a_full_disk_keeps_the_old_content_and_leaves_no_leftover(tmp_path, monkeypatch, step):
    path = tmp_path / "file"
    atomic_write(path, b"old content")
    fail_at(monkeypatch, step, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(
        StoreError, match=r"cannot write .*file \(what was there before is kept\): the disk is full"
    ):
        atomic_write(path, b"new content")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old content"


def test_a_failing_fsync_is_not_taken_for_success(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StoreError, match="Input/output error"):
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
    write_own(path, b"content")  # in a directory of geodl's it is damage
    assert (path.read_bytes(), path.is_symlink()) == (b"content", False)
    assert Path("/dev/null").is_char_device()


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(StoreError, match=r"nowhere/file .*No such file or directory"):
        atomic_write(tmp_path / "nowhere" / "file", b"content")


def test_files_have_the_permissions_of_ordinary_files(tmp_path):
    (tmp_path / "ordinary").write_bytes(b"")
    atomic_write(tmp_path / "file", b"")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == stat.S_IMODE(
        (tmp_path / "ordinary").stat().st_mode
    )


def test_json_bytes_do_not_depend_on_the_order_of_keys(tmp_path):
    write_json(tmp_path / "a", {"b": 1, "a": (0.1, "µ")})
    write_json(tmp_path / "b", {"a": [0.1, "µ"], "b": 1})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert read_json(tmp_path / "a") == {"a": [0.1, "µ"], "b": 1}


def test_json_refuses_what_json_cannot_say(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "a", {"x": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_damaged_and_missing_json_are_named(tmp_path):
    (tmp_path / "a").write_text('{"x": ')
    with pytest.raises(StoreError, match="a is damaged"):
        read_json(tmp_path / "a")
    with pytest.raises(StoreError, match=r"cannot read .*b: No such file"):
        read_json(tmp_path / "b")


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    count = int(torch.tensor(shape).prod()) if shape else 1
    values = draw(st.lists(st.integers(0, 100), min_size=count, max_size=count))
    return torch.tensor(values, dtype=torch.float64).reshape(shape).to(dtype)


PATH = Path("w.safetensors")


def back(tensors):
    """Give what is read again of tensors."""
    return parse_tensors(tensor_file(tensors), PATH)


@settings(max_examples=25)
@given(st.dictionaries(st.text(min_size=1, max_size=5), tensors(), max_size=4))
def test_tensors_come_back_bit_for_bit_and_the_order_does_not_matter(given_tensors):
    found = back(given_tensors)
    assert found.keys() == given_tensors.keys()
    for name, tensor in given_tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)
    assert tensor_file(dict(reversed(given_tensors.items()))) == tensor_file(given_tensors)


def test_shared_strided_and_trained_tensors_can_be_stored():
    weight = torch.nn.Parameter(
        torch.arange(24.0).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last)
    )
    given = {"weight": weight, "transposed": weight.mT, "row": weight[1], "same": weight}
    found = back(given)
    assert all(torch.equal(found[name], tensor) for name, tensor in given.items())
    found["row"].add_(1)  # what was read is ordinary memory, and each tensor has its own
    assert torch.equal(found["same"], weight)
    assert not found["weight"].requires_grad


def test_not_a_number_keeps_its_bits():
    found = back({"w": torch.tensor([float("nan"), -0.0, float("inf")])})
    assert found["w"].isnan().tolist() == [True, False, False]
    assert found["w"].signbit().tolist()[1:] == [True, False]


def test_pickled_tensors_are_refused(tmp_path):
    torch.save({"w": torch.zeros(2)}, tmp_path / "pickled")
    data = (tmp_path / "pickled").read_bytes()
    for odd in (data, b"", tensor_file({"w": torch.zeros(2)})[:-1]):
        with pytest.raises(
            StoreError, match=r"w\.safetensors is damaged, or not a file of geodl's"
        ):
            parse_tensors(odd, PATH)


def test_a_changed_bit_in_any_byte_and_any_truncation_of_a_sealed_file_are_found(tmp_path):
    path = tmp_path / "sealed"
    write_sealed(path, b"what stands alone")
    sound = path.read_bytes()
    for position in range(len(sound)):
        flipped = bytearray(sound)
        flipped[position] ^= 1 << (position % 8)
        for damaged in (flipped, sound[:position]):
            path.write_bytes(damaged)
            with pytest.raises(StoreError, match="sealed is damaged"):
                read_sealed(path)
    path.write_bytes(sound)
    assert read_sealed(path) == b"what stands alone"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "kind", ["pipe", "folder", "socket", "/dev/zero", "/dev/null", "/dev", "odd", "nothing"]
)
def test_only_regular_files_are_read(tmp_path, kind):
    path = tmp_path / "odd"
    put_odd(path, kind)
    for read in (read_file, read_json, read_sealed):
        with pytest.raises(
            StoreError, match=r"odd is not a regular file$|cannot read .*odd: [A-Z][\w ]+$"
        ):
            read(path)


def test_a_link_to_a_regular_file_is_read(tmp_path):
    write_json(tmp_path / "file", {"x": 1})
    (tmp_path / "link").symlink_to("file")
    assert read_json(tmp_path / "link") == {"x": 1}


def test_sizes_are_looked_at_before_a_file_is_read(tmp_path, monkeypatch):
    def fail(*arguments):
        raise AssertionError("read")

    path = tmp_path / "huge"
    path.write_bytes(b"")
    os.truncate(path, 2**42)
    monkeypatch.setattr(files, "read_from", fail)
    with pytest.raises(StoreError, match=r"huge is too large: 4398\.0 GB, where at most 67\.1 MB"):
        read_json(path)
    with pytest.raises(StoreError, match="huge is damaged: it has 4398046511104 bytes"):
        read_file(path, size=8)


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (MemoryError(), "7.0 GB do not fit into the memory"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
    ],
)
def test_a_file_that_fails_while_it_is_read_is_named(tmp_path, failure, words):
    class Failing:
        def read(self, size):
            raise failure

    with pytest.raises(StoreError, match=f"cannot read .*file: {words}"):
        files.read_from(Failing(), tmp_path / "file", 7 * 10**9)


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"NaN",
        b"[Infinity]",
        b"1e999",
        b"9" * 5000,
        b'"\xff"',
        b'"\xed\xa0\x80"',  # half a character
        rb'"\ud800"',
        b"\xef\xbb\xbf{}",
        "{}".encode("utf-16"),
        b"{} {}",
        b"",
    ],
    ids=lambda data: repr(data[:10]),
)
def test_what_geodl_could_not_have_written_is_no_json(tmp_path, data):
    (tmp_path / "odd.json").write_bytes(data)
    with pytest.raises(StoreError, match=r"odd\.json is damaged: it is not complete JSON") as error:
        read_json(tmp_path / "odd.json")
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 400


def test_json_that_could_not_be_read_again_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "JSON_LIMIT", 100)
    write_json(tmp_path / "a", ["x" * 50])
    with pytest.raises(
        StoreError, match=r"a JSON file of 10\d bytes is not written: the limit is 100 bytes"
    ):
        write_json(tmp_path / "a", ["x" * 100])
    assert read_json(tmp_path / "a") == ["x" * 50]


def test_a_checksum_covers_every_entry(tmp_path):
    value = {"a": 1, "b": [0.5]}
    assert verified(signed(value), tmp_path) == value
    for wrong in (
        signed(value) | {"a": 2},
        signed(value) | {"c": 1},
        value,
        [],
        None,
        signed(value) | {"sha256": 5},
    ):
        with pytest.raises(StoreError, match="is damaged"):
            verified(wrong, tmp_path)


def test_a_reader_of_odd_content_names_the_file(tmp_path):
    for fail in (
        lambda: {}["x"],
        lambda: [][0],
        lambda: None.x,
        lambda: int("\x1b"),
        lambda: 1 / 0,
        lambda: len(5),
    ):
        expected = pytest.raises(StoreError, match="odd is damaged, or not a file of geodl's")
        with expected as error, interpreting(tmp_path / "odd"):
            fail()
        assert str(error.value).isprintable()


def test_a_disk_that_allows_nothing_is_one_error(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(errno.EROFS, "Read-only file system")

    for method in ("open", "unlink", "mkdir", "replace"):
        monkeypatch.setattr(type(tmp_path), method, refuse)
    for write in (
        lambda: atomic_write(tmp_path / "x", b""),
        lambda: make_directory(tmp_path / "d"),
    ):
        with pytest.raises(StoreError, match=r"cannot write .*: Read-only file system$"):
            write()


def test_leftovers_that_cannot_be_removed_are_one_error(tmp_path, monkeypatch):
    (tmp_path / f"{files.TEMPORARY}x").touch()

    def refuse(*arguments, **options):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(type(tmp_path), "unlink", refuse)
    with pytest.raises(StoreError, match="Read-only file system"):
        files.remove_temporaries(tmp_path)


def test_folders_are_made_below_a_directory_but_not_through_a_link(tmp_path):
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


def test_leftovers_behind_a_link_stay(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / f"{files.TEMPORARY}x").write_text("mine")
    (tmp_path / "link").symlink_to(outside)
    files.remove_temporaries(tmp_path / "link")
    assert [path.name for path in outside.iterdir()] == [f"{files.TEMPORARY}x"]
    files.remove_temporaries(outside)
    assert not list(outside.iterdir())
