"""JSON, checksums and tensor files: canonical bytes, detection of damage, errors that name the file."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geodl.core import content
from geodl.core.content import (
    interpreting,
    json_file,
    parse_object,
    read_sealed,
    signed,
    verified,
    write_sealed,
)
from geodl.core.errors import StoreError
from geodl.core.tensors import parse_tensors, tensor_file

FLOATS = ["float32", "float64", "float16", "bfloat16"]
DTYPES = [getattr(torch, name) for name in [*FLOATS, "int64", "uint8", "bool"]]
PATH = Path("w.safetensors")


# -- JSON


def test_json_bytes_do_not_depend_on_the_order_of_keys():
    data = json_file({"b": 1, "a": (0.1, "µ")})
    assert data == json_file({"a": [0.1, "µ"], "b": 1})
    assert parse_object(data, PATH) == {"a": [0.1, "µ"], "b": 1}


@pytest.mark.parametrize(
    "data",
    [
        b'{"x": ',
        b"[" * 100_000,
        b"[Infinity]",
        b"9" * 5000,
        b'"\xff"',
        rb'"\ud800"',  # half a character
        "{}".encode("utf-16"),
        b"",
    ],
    ids=lambda data: repr(data[:10]),
)
def test_json_that_geodl_cannot_have_written_is_damaged(data):
    with pytest.raises(StoreError, match=r"is damaged: it is not complete JSON") as error:
        parse_object(data, PATH)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 400


def test_json_that_could_not_be_read_again_is_not_written(monkeypatch):
    monkeypatch.setattr(content, "JSON_LIMIT", 100)
    with pytest.raises(StoreError, match=r"JSON file of 1\d\d bytes .* the limit is 100 bytes"):
        json_file({"x": "x" * 100})
    with pytest.raises(ValueError, match="JSON compliant"):
        json_file({"x": float("nan")})


@pytest.mark.parametrize(
    "fail",
    [lambda: {}["x"], lambda: None.x, lambda: int("\x1b"), lambda: 1 / 0, lambda: len(5)],
)
def test_errors_about_unexpected_content_name_the_file(tmp_path, fail):
    expected = pytest.raises(StoreError, match="odd is damaged, or not a geodl file")
    with expected as error, interpreting(tmp_path / "odd"):
        fail()
    assert str(error.value).isprintable()


# -- checksums


def test_a_checksum_covers_every_entry(tmp_path):
    value = {"a": 1, "b": [0.5]}
    assert verified(signed(value), tmp_path) == value
    for change in ({"a": 2}, {"c": 1}, {"sha256": 5}):
        with pytest.raises(StoreError, match="is damaged"):
            verified(signed(value) | change, tmp_path)
    with pytest.raises(StoreError, match="has no checksum"):
        verified(value, tmp_path)


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


# -- tensors


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    count = int(torch.tensor(shape).prod()) if shape else 1
    values = draw(st.lists(st.integers(0, 100), min_size=count, max_size=count))
    return torch.tensor(values, dtype=torch.float64).reshape(shape).to(dtype)


def back(tensors):
    """Return tensors after writing and reading."""
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
    values = torch.arange(24.0).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last)
    weight = torch.nn.Parameter(values)
    given = {"weight": weight, "transposed": weight.mT, "row": weight[1], "same": weight}
    found = back(given)
    assert all(torch.equal(found[name], tensor) for name, tensor in given.items())
    found["row"].add_(1)  # tensors are writable and share no memory
    assert torch.equal(found["same"], weight)
    assert not found["weight"].requires_grad


def test_pickled_tensors_are_refused(tmp_path):
    torch.save({"w": torch.zeros(2)}, tmp_path / "pickled")
    data = (tmp_path / "pickled").read_bytes()
    for odd in (data, b"", tensor_file({"w": torch.zeros(2)})[:-1]):
        with pytest.raises(StoreError, match=r"w\.safetensors is damaged, or not a geodl file"):
            parse_tensors(odd, PATH)
