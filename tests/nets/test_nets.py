"""Backbones, networks built by name, and teachers."""

import io
import itertools

import numpy as np
import pytest
import torch
from tests.helpers.phases import changed, weights_of
from torch import nn

from geodl.core.errors import ConfigError
from geodl.nets import (
    BACKBONES,
    CosineHead,
    LinearHead,
    Network,
    build_network,
    check_network,
    folded,
    frozen_copy,
)
from geodl.nets.network import FrozenNetwork

# Parameters counted by hand (3x3 convolutions, batch norms of two numbers a channel, 1x1 shortcuts where the width
# changes), width, and the side of the map for images of a size.
FACTS = {
    "convnet": (14_384, 32, 8, 2),
    "efficientnet-lite0": (3_371_008, 1280, 64, 2),  # of the 4.65 million with its classifier
    "efficientnet-lite2": (4_811_072, 1280, 64, 2),  # of the 6.09 million with its classifier
    "resnet8": (77_392, 64, 32, 8),
    "resnet20": (271_824, 64, 32, 8),
    "resnet32": (466_256, 64, 32, 8),
    "resnet18": (11_176_512, 512, 64, 2),
}


def pictures(size: int = 16, count: int = 4, seed: int = 0) -> torch.Tensor:
    images = torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))
    return images.contiguous(memory_format=torch.channels_last)


def small(name: str = "resnet8", head: str = "cosine") -> Network:
    """Build a network whose batch norms have seen something, with gains and offsets that are not 1 and 0."""
    network = build_network(name, 5, head=head, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.5, 1.5, generator=generator)
                module.bias.normal_(0, 0.3, generator=generator)
        for seed in range(3):
            network(pictures(seed=seed))
    return network


class Given(nn.Module):
    """A backbone that returns its input."""

    def forward(self, x):
        return x


def parameter_count(module):
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", sorted(BACKBONES))
def test_sizes(name):
    count, width, size, side = FACTS[name]
    network = build_network(name, 10, head="cosine")
    assert network.width == network.backbone.width == width
    assert parameter_count(network.backbone) == count
    assert parameter_count(network.head) == 10 * width + 1
    assert parameter_count(build_network(name, 10, head="linear").head) == 10 * (width + 1)
    features = network.backbone(pictures(size, 2))
    assert features.shape == (2, width, side, side)
    if not name.startswith("efficientnet"):
        assert 0.2 < (features < 0).float().mean() < 0.8  # features can be negative
    logits, pooled, grid = network(pictures(size, 2))
    assert (logits.shape, pooled.shape, grid.shape) == ((2, 10), (2, width), (2, 4 * width))


def test_only_the_last_relu_is_removed():
    backbone = build_network("resnet20", 2, head="cosine").backbone
    minima = []
    for block in (*backbone.layer1, *backbone.layer2, *backbone.layer3):
        block.register_forward_hook(lambda _block, _inputs, y: minima.append(y.min().item()))
    backbone(pictures())
    assert len(minima) == 9
    assert minima[:-1] == [0.0] * 8
    assert minima[-1] < 0


@pytest.mark.parametrize(
    ("name", "layer", "fan_out"),
    [
        ("resnet32", "layer3.0.conv1", 64 * 9),
        ("efficientnet-lite0", "blocks.12.depthwise.conv", 25),  # each input reaches one output
    ],
)
def test_convolutions_are_kaiming_normal_fan_out(name, layer, fan_out):
    backbone = build_network(name, 2, head="cosine").backbone
    deviation = backbone.get_submodule(layer).weight.std().item()
    assert deviation == pytest.approx((2 / fan_out) ** 0.5, rel=0.03)


@pytest.mark.parametrize("head", ["cosine", "linear"])
def test_weights_come_from_the_seed_and_the_global_generator_is_left_alone(head):
    torch.manual_seed(1)
    one = build_network("resnet8", 4, head=head, seed=7).state_dict()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    two = build_network("resnet8", 4, head=head, seed=7).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)
    other = build_network("resnet8", 4, head=head, seed=8).state_dict()
    assert not torch.equal(one["backbone.conv1.weight"], other["backbone.conv1.weight"])
    assert not torch.equal(one["head.weight"], other["head.weight"])
    cosine = build_network("resnet8", 4, head="cosine", seed=7).backbone
    assert torch.equal(cosine.conv1.weight, one["backbone.conv1.weight"])  # whatever the head


def test_networks_and_teachers_are_channels_last():
    network = build_network("resnet8", 2, head="cosine")
    for each in (network, frozen_copy(network)):
        convolutions = [module for module in each.modules() if isinstance(module, nn.Conv2d)]
        assert len(convolutions) == 9
        for module in convolutions:
            assert module.weight.is_contiguous(memory_format=torch.channels_last)
    assert network.backbone(pictures()).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("side", [1, 2, 3, 4, 7, 8])
def test_pooled_and_grid_features_equal_numpy(side):
    network = Network(Given(), LinearHead(5, 3))
    maps = torch.randn(2, 5, side, side, generator=torch.Generator().manual_seed(side))
    output = network(maps)
    values = maps.double().numpy()
    np.testing.assert_allclose(output.pooled.numpy(), values.mean((2, 3)), atol=1e-6)
    if side == 1:
        assert torch.equal(output.grid, output.pooled)
        return
    # Quarters of an odd map overlap in the middle row and column.
    low, high = slice(0, -(-side // 2)), slice(side // 2, side)
    parts = itertools.product((low, high), (low, high))
    quarters = [values[:, :, rows, columns].mean((2, 3)) for rows, columns in parts]
    expected = np.stack(quarters, axis=2).reshape(2, 20)
    np.testing.assert_allclose(output.grid.numpy(), expected, atol=1e-6)


def test_a_backbone_without_a_map_gives_its_features_as_the_grid():
    network = Network(Given(), CosineHead(5, 3))
    features = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    output = network(features)
    assert torch.equal(output.pooled, features)
    assert torch.equal(output.grid, features)
    assert torch.equal(network.features(features), features)
    assert torch.equal(network.head(features), output.logits)


def cells(maps: np.ndarray, side: int) -> np.ndarray:
    """Average maps (B, d, h, w) over side x side cells, from floor(i h / side) to ceil((i + 1) h / side): (B, d side^2)."""
    size = maps.shape[2]
    edges = [slice(i * size // side, -(-(i + 1) * size // side)) for i in range(side)]
    values = [maps[:, :, rows, columns].mean((2, 3)) for rows in edges for columns in edges]
    return np.stack(values, axis=2).reshape(len(maps), -1)


LEVELS = {
    "convnet": ("stage1", "stage2", "stage3"),
    "resnet8": ("stage1", "stage2", "stage3"),
    "resnet18": ("stage1", "stage2", "stage3", "stage4"),
    "efficientnet-lite0": ("stride4", "stride8", "stride16", "stride32", "top"),
}


@pytest.mark.parametrize("size", [32, 37])
@pytest.mark.parametrize("name", ["resnet8", "resnet18"])
@torch.no_grad()
def test_levels_are_the_maps_of_the_stages_on_a_grid(name, size):
    network = small(name).eval()
    maps = []
    for stage in range(1, len(LEVELS[name]) + 1):
        layer = network.backbone.get_submodule(f"layer{stage}")
        layer.register_forward_hook(lambda _layer, _inputs, y: maps.append(y.double().numpy()))
    assert network.level_names == LEVELS[name]
    grids = {"": 2, "@1": 1, "@3": 3, "@4": 4}
    wanted = ["".join(pair) for pair in itertools.product(LEVELS[name], grids)]
    _, blocks = network.with_levels(pictures(size), wanted[::-1])
    assert list(blocks) == wanted[::-1]
    assert len(maps) == len(LEVELS[name])  # in one pass
    for level, values in zip(LEVELS[name], maps, strict=True):
        for grid, count in grids.items():
            expected, found = cells(values, min(count, values.shape[2])), blocks[level + grid]
            np.testing.assert_allclose(found.numpy(), expected, atol=1e-5 * np.abs(values).max())


@pytest.mark.parametrize("name", LEVELS)
@torch.no_grad()
def test_the_deepest_level_is_the_input_of_the_head(name):
    network = small(name).eval()
    assert network.level_names == LEVELS[name]
    (deepest,) = network.with_levels(pictures(32), [f"{LEVELS[name][-1]}@1"])[1].values()
    torch.testing.assert_close(deepest, network.features(pictures(32)))


def test_unknown_levels_are_refused():
    network = small()
    for level in ("stage4", "stage4@2"):
        with pytest.raises(ConfigError, match=r"unknown level 'stage4.*stage1, stage2, stage3"):
            network.with_levels(pictures(), ["stage1", level])
    for cells in ("", "0", "65", "-1", "two", "²", "2@2"):
        with pytest.raises(ConfigError, match="cells per side, 1 to 64"):
            network.with_levels(pictures(), [f"stage1@{cells}"])


@torch.no_grad()
@pytest.mark.parametrize("head", ["cosine", "linear"])
def test_levels_and_logits_under_autocast_are_computed_in_float32(head):
    network = small(head=head).eval()
    _, exact = network.with_levels(pictures(), network.level_names)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, blocks = network.with_levels(pictures(), network.level_names)
    assert torch.equal(output.logits, network.head(output.pooled))
    for level, block in blocks.items():
        assert block.dtype == torch.float32
        assert not torch.equal(block, block.bfloat16().float())
        assert (block - exact[level]).norm() < 0.02 * exact[level].norm()


class Levels(nn.Module):
    """Returns the features of all levels as a tuple, for export."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, x):
        return tuple(self.network.with_levels(x, self.network.level_names)[1].values())


@pytest.mark.parametrize(("name", "size"), [("resnet8", 18), ("efficientnet-lite0", 72)])
@pytest.mark.filterwarnings("ignore")  # torch's own, about its own exporter
def test_levels_can_be_exported(name, size):
    onnxruntime = pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")
    network = folded(small(name))
    network.backbone.fix_size(size)
    model, file = Levels(network), io.BytesIO()
    torch.onnx.export(
        model,
        (pictures(size, 2),),
        file,
        dynamo=False,
        input_names=["x"],
        dynamic_axes={"x": {0: "batch"}},
        opset_version=17,
    )
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    images = pictures(size, 5, seed=7)
    found = session.run(None, {"x": images.contiguous().numpy()})
    with torch.no_grad():
        for theirs, ours in zip(found, model(images), strict=True):
            assert np.abs(theirs - ours.numpy()).max() <= 1e-4 * ours.abs().max()


def test_unknown_names_are_refused_with_allowed_values():
    for name in ("resnet33", "", 5, None):
        with pytest.raises(ConfigError, match=r"network = .* allowed values are convnet, eff"):
            build_network(name, 2, head="cosine")
        with pytest.raises(ConfigError, match="network = "):
            check_network(name)
    with pytest.raises(ConfigError, match="'cos'; allowed are cosine and linear"):
        build_network("resnet8", 2, head="cos")
    with pytest.raises(ConfigError, match=r"'resnet8': allowed .*-lite0, efficientnet-lite2"):
        build_network("resnet8", 2, head="cosine", pretrained=True)


@pytest.mark.parametrize("head", ["cosine", "linear"])
@pytest.mark.parametrize("name", ["convnet", "resnet8", "resnet18", "efficientnet-lite0"])
def test_a_teacher_computes_the_same_as_the_network_in_eval_mode(name, head):
    network = small(name, head)
    network.head.freeze(torch.tensor([True, True, False, False, True]))
    network.head.correct([4], torch.tensor(0.8), torch.tensor(0.3))
    teacher = frozen_copy(network)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in teacher.modules())
    images = pictures(size=32)
    network.eval()
    with torch.no_grad():
        for ours, theirs in zip(teacher(images), network(images), strict=True):
            assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
        expected = network.features(images)
        torch.testing.assert_close(teacher.features(images), expected, rtol=1e-5, atol=1e-4)
        taught = teacher.with_levels(images, teacher.level_names)[1]
        for level, block in network.with_levels(images, network.level_names)[1].items():
            assert (taught[level] - block).abs().max() <= 1e-5 * block.abs().max()


@pytest.mark.parametrize(("copied", "kind"), [(folded, Network), (frozen_copy, FrozenNetwork)])
def test_a_folded_copy_and_its_network_are_independent(copied, kind):
    network = small()
    before, flags = weights_of(network), [module.training for module in network.modules()]
    copy = copied(network)
    assert type(copy) is kind
    assert not copy.training
    assert not any(isinstance(module, nn.BatchNorm2d) for module in copy.modules())
    assert [module.training for module in network.modules()] == flags
    assert all(parameter.requires_grad for parameter in network.parameters())
    assert not changed(before, network.state_dict())
    expected = copy(pictures()).logits
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(1.0)
    assert torch.equal(copy(pictures()).logits, expected)


def test_a_teacher_stays_in_eval_mode():
    holder = nn.ModuleDict({"student": small(), "teacher": frozen_copy(small())})
    expected = holder["teacher"](pictures()).logits
    holder.train()
    assert holder["student"].training
    assert not any(module.training for module in holder["teacher"].modules())
    assert torch.equal(holder["teacher"](pictures()).logits, expected)


def test_a_teacher_makes_no_graph_but_can_be_learned_from():
    network = small()
    teacher = frozen_copy(network)
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    images = pictures().requires_grad_()
    targets = teacher(images)
    assert not any(value.requires_grad for value in targets)
    assert not teacher.features(images).requires_grad
    output, levels = teacher.with_levels(images, teacher.level_names)
    assert not any(value.requires_grad for value in (*output, *levels.values()))
    # The student's backward pass needs the teacher's features: inference tensors could not be saved for it.
    (network(pictures()).pooled * targets.pooled).sum().backward()
    assert network.backbone.conv1.weight.grad.abs().sum() > 0


def test_a_teacher_has_no_frozen_rows_and_can_be_copied_as_a_teacher():
    network = small()
    rows = network.head.weight.detach().clone()
    network.head.freeze(torch.tensor([True, True, True, False, False]))
    teacher = frozen_copy(network)
    assert torch.equal(teacher.head.weight, rows)
    assert network.head.frozen.tolist() == [True, True, True, False, False]
    assert torch.equal(frozen_copy(teacher)(pictures()).logits, teacher(pictures()).logits)


def test_convnet_uses_no_batch_statistics():
    network = build_network("convnet", 3, head="cosine")
    whole = network(pictures(8)).pooled
    parts = torch.cat([network(part).pooled for part in pictures(8).split([1, 3])])
    torch.testing.assert_close(parts, whole)
