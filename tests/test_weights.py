"""Weights from files of others: matched by name, under a prefix, or by order; and files that do not fit or would run code."""

import pickle
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.torch_version import TorchVersion

from geodl.errors import ConfigError, DataError
from geodl.nets import build_network


@pytest.fixture
def state():
    """Make the state of a small backbone, other than that of seed 0."""
    state = build_network("resnet8", 3, head="cosine", seed=5).backbone.state_dict()
    return OrderedDict((key, value.contiguous()) for key, value in state.items())


def loaded(file: Path) -> dict[str, torch.Tensor]:
    return build_network("resnet8", 3, head="cosine", weights=file).backbone.state_dict()


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def renamed(state) -> OrderedDict[str, torch.Tensor]:
    """Give all layers the names of another program, in the same order."""
    layers = {}
    return OrderedDict(
        (f"part{layers.setdefault(layer, len(layers))}.{leaf}", value)
        for (layer, _, leaf), value in ((key.rpartition("."), value) for key, value in state.items())
    )


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt"])
@pytest.mark.parametrize("prefix", ["", "module.", "backbone.", "model.encoder."])
def test_names_are_found_under_a_prefix_beside_other_tensors(state, tmp_path, suffix, prefix):
    content = {prefix + key: value for key, value in state.items()} | {"fc.weight": torch.ones(9, 64)}
    file = tmp_path / f"weights{suffix}"
    save_file(content, file) if suffix == ".safetensors" else torch.save(content, file)
    assert same(loaded(file), state)


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_a_checkpoint_may_hold_more_than_the_weights(state, tmp_path, key):
    torch.save({"epoch": 3, key: state, "optimizer": {"lr": 0.1}}, tmp_path / "checkpoint.pth")
    assert same(loaded(tmp_path / "checkpoint.pth"), state)


def test_a_network_written_here_gives_its_backbone(tmp_path):
    network = build_network("resnet8", 3, head="cosine", seed=5)
    save_file({key: value.contiguous() for key, value in network.state_dict().items()}, tmp_path / "model.safetensors")
    assert same(loaded(tmp_path / "model.safetensors"), network.backbone.state_dict())


def test_files_without_counters_of_batches_fit(state, tmp_path):
    torch.save({key: value for key, value in state.items() if "num_batches" not in key}, tmp_path / "old.pth")
    assert same(loaded(tmp_path / "old.pth"), state)


def test_other_names_are_matched_by_order_and_shape_with_a_word(state, tmp_path, caplog):
    torch.save(renamed(state) | {"classifier.weight": torch.ones(9, 64)}, tmp_path / "other.pth")
    assert same(loaded(tmp_path / "other.pth"), state)
    (record,) = caplog.records
    assert record.name == "geodl"
    assert "other.pth: the names are those of another program; matched by order and shape" in record.getMessage()


def test_no_order_is_trusted_that_may_be_another(state, tmp_path):
    other = renamed(state)
    torch.save(
        OrderedDict(sorted(other.items())), tmp_path / "sorted.pth"
    )  # mean before weight: shapes alone would fit
    with pytest.raises(DataError, match=r"sorted.pth do not fit the network: 45 of 45 .* first conv1.weight"):
        loaded(tmp_path / "sorted.pth")
    save_file(dict(other), tmp_path / "other.safetensors")  # keeps no order
    with pytest.raises(DataError, match=r"other.safetensors do not fit"):
        loaded(tmp_path / "other.safetensors")
    torch.save(OrderedDict(list(other.items())[:-8]), tmp_path / "short.pth")
    with pytest.raises(DataError, match=r"short.pth do not fit"):
        loaded(tmp_path / "short.pth")


def test_what_is_missing_or_has_another_shape_is_named(state, tmp_path):
    for suffix in (".safetensors", ".pth"):
        file = tmp_path / f"weights{suffix}"
        save = save_file if suffix == ".safetensors" else torch.save
        save({f"module.{key}": value for key, value in state.items() if key != "layer2.0.conv1.weight"}, file)
        with pytest.raises(DataError, match=rf"weights{suffix} .* 1 of 45 .* first layer2.0.conv1.weight"):
            loaded(file)
        save(dict(state) | {"conv1.weight": torch.ones(8, 3, 3, 3)}, file)
        with pytest.raises(DataError, match=r"1 of 45 .* first conv1.weight"):
            loaded(file)


def test_values_that_are_not_finite_are_refused(state, tmp_path):
    state["layer1.0.bn1.running_var"][3] = torch.inf
    torch.save({f"module.{key}": value for key, value in state.items()}, tmp_path / "broken.pth")
    with pytest.raises(DataError, match=r"broken.pth: module.layer1.0.bn1.running_var has values that are not finite"):
        loaded(tmp_path / "broken.pth")


def test_half_precision_is_widened(state, tmp_path):
    save_file(
        {key: value.half() if value.is_floating_point() else value for key, value in state.items()},
        tmp_path / "h.safetensors",
    )
    found = loaded(tmp_path / "h.safetensors")
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
    with pytest.raises(
        ConfigError, match=r"weights.pth: torch 2.5.1\+cpu .* needs torch 2.6 or newer, or .* safetensors"
    ):
        loaded(tmp_path / "weights.pth")
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.10.0"))
    assert same(loaded(tmp_path / "weights.pth"), state)


@pytest.mark.parametrize("content", [[1, 2], {}, {"epoch": 3}, torch.ones(3), {"state_dict": {"lr": 0.1}}])
def test_a_file_without_named_tensors_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "weights.pth")
    with pytest.raises(DataError, match=r"weights.pth hold no tensors by name"):
        loaded(tmp_path / "weights.pth")


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_files_that_cannot_be_read_are_refused_in_one_line(state, tmp_path, suffix):
    file = tmp_path / f"weights{suffix}"
    torch.save(state, tmp_path / "whole")
    for content in (b"", b"no tensors", (tmp_path / "whole").read_bytes()[:5000]):
        file.write_bytes(content)
        with pytest.raises(DataError, match=rf"weights{suffix} cannot be read") as caught:
            loaded(file)
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=rf"nowhere{suffix} cannot be read"):
        loaded(tmp_path / f"nowhere{suffix}")
