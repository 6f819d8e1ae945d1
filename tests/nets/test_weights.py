"""Weights from files: matching by name, prefix or order; files that do not fit or contain code."""

import os
import pickle
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.torch_version import TorchVersion

from geodl.core.errors import ConfigError, DataError
from geodl.nets import build_network


@pytest.fixture
def state():
    """Return the state of a small backbone with another seed than 0."""
    state = build_network("resnet8", 3, head="cosine", seed=5).backbone.state_dict()
    return OrderedDict((key, value.contiguous()) for key, value in state.items())


def loaded(file: Path) -> dict[str, torch.Tensor]:
    return build_network("resnet8", 3, head="cosine", weights=file).backbone.state_dict()


def save(content, file: Path) -> Path:
    """Write tensors in the format of the suffix."""
    contiguous = {key: value.contiguous() for key, value in content.items()}
    save_file(contiguous, file) if file.suffix == ".safetensors" else torch.save(contiguous, file)
    return file


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[key]) for key, value in one.items()
    )


def renamed(state) -> OrderedDict[str, torch.Tensor]:
    """Return tensors with other names of layers, in the same order."""
    layers = {}
    return OrderedDict(
        (f"part{layers.setdefault(layer, len(layers))}.{leaf}", value)
        for (layer, _, leaf), value in (
            (key.rpartition("."), value) for key, value in state.items()
        )
    )


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt"])
@pytest.mark.parametrize("prefix", ["", "module.", "backbone.", "model.encoder."])
def test_names_are_found_under_a_prefix_beside_other_tensors(state, tmp_path, suffix, prefix):
    content = {prefix + key: value for key, value in state.items()}
    content |= {"fc.weight": torch.ones(9, 64)}
    assert same(loaded(save(content, tmp_path / f"weights{suffix}")), state)


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_a_checkpoint_may_hold_more_than_the_weights_and_no_counters(state, tmp_path, key):
    old = {name: value for name, value in state.items() if "num_batches" not in name}
    torch.save({"epoch": 3, key: old, "optimizer": {"lr": 0.1}}, tmp_path / "checkpoint.pth")
    assert same(loaded(tmp_path / "checkpoint.pth"), state)


def test_other_names_are_matched_by_order_and_shape_with_a_warning(state, tmp_path, caplog):
    torch.save(renamed(state) | {"classifier.weight": torch.ones(9, 64)}, tmp_path / "other.pth")
    assert same(loaded(tmp_path / "other.pth"), state)
    order, left = (record.getMessage() for record in caplog.records)
    assert "other.pth: unknown names of tensors; matched by order" in order
    assert "other.pth: not used: classifier.weight" in left


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("smaller", ["resnet8", "resnet20"])
@pytest.mark.parametrize("prefix", ["", "backbone."])
def test_weights_of_another_network_are_refused_with_its_name(tmp_path, suffix, smaller, prefix):
    state = build_network("resnet32", 2, head="cosine").backbone.state_dict()
    content = {prefix + key: value for key, value in state.items()}
    content |= {"fc.weight": torch.ones(9, 64), "fc.bias": torch.ones(9)}
    file = save(content, tmp_path / f"weights{suffix}")
    before = torch.get_rng_state()
    with pytest.raises(DataError, match=r"too many.*they fit the network resnet32"):
        build_network(smaller, 2, head="cosine", weights=file)
    assert torch.equal(torch.get_rng_state(), before)
    build_network("resnet32", 2, head="cosine", weights=file)
    with pytest.raises(DataError, match=r"missing.*they fit the network resnet32"):
        build_network("resnet18", 2, head="cosine", weights=file)


def test_tensors_are_not_matched_by_an_uncertain_order(state, tmp_path):
    other = renamed(state)
    for name, content in (
        ("sorted.pth", sorted(other.items())),  # mean before weight: shapes alone would fit
        ("other.safetensors", other.items()),  # keeps no order
        ("short.pth", list(other.items())[:-8]),
    ):
        with pytest.raises(DataError, match=rf"{name} do not fit .* 45 of 45 .* conv1.weight"):
            loaded(save(dict(content), tmp_path / name))


def test_what_is_missing_or_has_another_shape_is_named(state, tmp_path):
    gone = "layer2.0.conv1.weight"
    short = {f"module.{key}": value for key, value in state.items() if key != gone}
    for file in (tmp_path / "weights.safetensors", tmp_path / "weights.pth"):
        with pytest.raises(DataError, match=rf"{file.name} .* 1 of 45 .* first {gone}"):
            loaded(save(short, file))
        with pytest.raises(DataError, match=r"1 of 45 .* first conv1.weight"):
            loaded(save(dict(state) | {"conv1.weight": torch.ones(8, 3, 3, 3)}, file))


def test_values_that_are_not_finite_are_refused(state, tmp_path):
    state["layer1.0.bn1.running_var"][3] = torch.inf
    prefixed = {f"module.{key}": value for key, value in state.items()}
    with pytest.raises(DataError, match=r"broken.pth: module.layer1.0.bn1.running_var .* finite"):
        loaded(save(prefixed, tmp_path / "broken.pth"))


def test_half_precision_is_widened(state, tmp_path):
    half = {key: value.half() for key, value in state.items()}
    found = loaded(save(half, tmp_path / "h.safetensors"))
    assert found["conv1.weight"].dtype == torch.float32
    torch.testing.assert_close(found["conv1.weight"], state["conv1.weight"], rtol=1e-3, atol=1e-6)


class Evil:
    """An object whose unpickling writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_runs_no_code(state, tmp_path):
    torch.save({"state_dict": state, "more": Evil(tmp_path / "ran")}, tmp_path / "evil.pth")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    for name in ("evil.pth", "plain.pt"):
        with pytest.raises(DataError, match=rf"{name} cannot be read as tensors: .*") as caught:
            loaded(tmp_path / name)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_an_old_torch_reads_no_pickle(state, tmp_path, monkeypatch):
    torch.save(state, tmp_path / "weights.pth")
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.5.1+cpu"))
    with pytest.raises(ConfigError, match=r"weights.pth: .*torch 2.5.1\+cpu .* torch 2.6 or newer"):
        loaded(tmp_path / "weights.pth")
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.10.0"))
    assert same(loaded(tmp_path / "weights.pth"), state)


@pytest.mark.parametrize("content", [[1, 2], {}, torch.ones(3), {"state_dict": {"lr": 0.1}}])
def test_a_file_without_named_tensors_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "weights.pth")
    with pytest.raises(DataError, match=r"weights.pth hold no tensors by name"):
        loaded(tmp_path / "weights.pth")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_files_that_cannot_be_read_are_refused_in_one_line(state, tmp_path, suffix):
    file = tmp_path / f"weights{suffix}"
    torch.save(state, tmp_path / "whole")
    for content in (b"", b"no tensors", (tmp_path / "whole").read_bytes()[:5000]):
        file.write_bytes(content)
        with pytest.raises(DataError, match=rf"weights{suffix} cannot be read") as caught:
            loaded(file)
        assert "\n" not in str(caught.value)
    os.mkfifo(tmp_path / f"pipe{suffix}")  # which opening would wait for
    for name in ("nowhere", "pipe"):
        with pytest.raises(DataError, match=rf"{name}{suffix} cannot be read"):
            loaded(tmp_path / f"{name}{suffix}")
