"""timm models as backbones: with a stand-in, and real ones if the extra is installed."""

import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers import tiny
from tests.helpers.backbones import StandIn
from torch import nn

from geodl import IncrementalClassifier, Learner
from geodl.app.export import export
from geodl.core.errors import ConfigError, MissingExtraError
from geodl.data.batches import resized
from geodl.nets import CosineHead, Network, build_network, expected_images, frozen_copy
from geodl.nets.timm_backbone import TimmBackbone

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["map", "swin", "vit"])
def test_models_without_stages(timm_calls, kind):
    network = build_network(f"timm:{kind}", 3, head="cosine", pretrained=kind == "vit")
    maps = network.backbone.model.conv(IMAGES)
    output, levels = network.with_levels(IMAGES, network.level_names)
    if kind == "vit":  # no map: the features of the first token
        pooled = grid = maps[:, :, 0, 0]
    else:
        pooled, grid = maps.mean((2, 3)), nn.functional.avg_pool2d(maps, 2).flatten(1)
    torch.testing.assert_close(output.pooled, pooled)
    torch.testing.assert_close(output.grid, grid)
    assert levels.keys() == {"top"}
    assert torch.equal(levels["top"], network.features(IMAGES))
    assert timm_calls == [(kind, {"pretrained": kind == "vit", "num_classes": 0})]


class Staged(StandIn):
    """A model that also returns the maps of its stages, as (B, d, h, w)."""

    def __init__(self, stages: int) -> None:
        super().__init__("swin")
        self.feature_info = [{"num_chs": 6}] * stages

    def forward_intermediates(self, x, indices):
        maps = [(stage + 1) * self.conv(x) for stage in range(len(self.feature_info))]
        return self.forward_features(x), [maps[stage] for stage in indices]


@pytest.mark.parametrize(
    ("stages", "names"),
    [(4, "1 2 3 4"), (5, "1 2 3 4 5"), (6, "2 4 6"), (12, "3 6 9 12"), (24, "4 9 14 19 24")],
)
def test_levels_are_stages_that_timm_gives_and_the_top(stages, names):
    backbone = TimmBackbone(Staged(stages))
    network = Network(backbone, CosineHead(6, 3))
    assert network.level_names == (*(f"stage{number}" for number in names.split()), "top")
    quarters = nn.functional.avg_pool2d(backbone.model.conv(IMAGES), 2).flatten(1)
    _, blocks = network.with_levels(IMAGES, network.level_names)
    for number in map(int, names.split()):
        torch.testing.assert_close(blocks[f"stage{number}"], number * quarters)
    torch.testing.assert_close(blocks["top"], network.features(IMAGES))


class Tokens(StandIn):
    """A transformer with a class token and another one before those of its patches, moved on by each block."""

    def __init__(self, blocks: int) -> None:
        super().__init__("vit")
        self.feature_info = [{"num_chs": 6}] * blocks
        self.cls_token = nn.Parameter(torch.ones(1, 1, 6))

    def forward_features(self, x):
        patches = self.conv(x).flatten(2).transpose(1, 2)
        first = self.cls_token * patches.mean(1, keepdim=True)
        return torch.cat([first, -first, patches], 1)

    def forward_intermediates(self, x, indices, return_prefix_tokens=False):
        assert return_prefix_tokens
        found = self.forward_features(x)
        given = [(stage + 1) * found for stage in indices]
        return found, [(each[:, 2:], each[:, :2]) for each in given]


def test_levels_of_a_vision_transformer_are_the_class_tokens_of_its_blocks():
    backbone = TimmBackbone(Tokens(12))
    network = Network(backbone, CosineHead(6, 3))
    assert network.level_names == ("stage3", "stage6", "stage9", "stage12", "top")
    token = backbone.model.forward_features(IMAGES)[:, 0]
    output, blocks = network.with_levels(IMAGES, network.level_names)
    for number in (3, 6, 9, 12):
        torch.testing.assert_close(blocks[f"stage{number}"], number * token)
    torch.testing.assert_close(output.pooled, token)


def test_the_closed_form_reads_the_class_tokens_of_several_blocks(timm_calls, monkeypatch):
    monkeypatch.setattr(sys.modules["timm"], "create_model", lambda name, **options: Tokens(12))
    data = tiny.dataset(classes=4, size=16)
    learner = Learner(
        method="analytic", network="timm:vit", pretrained=True, keep_features=True, flip=False
    )
    for classes in ((0, 1), (2, 3)):
        learner.learn(data.train.select(torch.isin(data.train.labels, torch.tensor(classes))))
    assert learner.evaluate(data.test)["analytic"].accuracy > 60
    widths = {name: z.shape[1] for name, z in learner.known.default.state.z.items()}
    assert widths == dict.fromkeys(("stage3", "stage6", "stage9", "stage12", "top"), 6)


def test_images_of_the_wrong_size_are_refused(timm_calls):
    network = build_network("timm:vit", 3, head="cosine")
    for ask in (network, network.features, lambda x: network.with_levels(x, ["top"])):
        with pytest.raises(ConfigError, match=r"image_size.*8 x 12.*doesn't match"):
            ask(torch.zeros(2, 3, 8, 12))


def test_weights_have_timms_own_names(timm_calls, tmp_path):
    state = {"conv.weight": torch.ones(6, 3, 4, 4), "conv.bias": torch.zeros(6)}
    save_file(state, tmp_path / "model.safetensors")
    network = build_network("timm:map", 3, head="cosine", weights=tmp_path / "model.safetensors")
    assert torch.equal(network.backbone.model.conv.weight, state["conv.weight"])


def test_unknown_models_and_tags_are_refused(timm_calls):
    with pytest.raises(ConfigError, match="no model 'swim'; similar names are timm:swin"):
        build_network("timm:swim", 3, head="cosine")
    with pytest.raises(ConfigError, match=r"cannot build 'map\.none': Invalid pretrained tag"):
        build_network("timm:map.none", 3, head="cosine")


def test_a_timm_that_cannot_be_imported_is_explained(monkeypatch):
    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "timm":
                raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.delitem(sys.modules, "timm", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(ConfigError, match=r"with this torch: operator torchvision::nms"):
        build_network("timm:map", 3, head="cosine")


def test_info_and_rename_need_no_timm(timm_calls, monkeypatch, tmp_path):
    model = IncrementalClassifier(tmp_path / "m")
    data = tiny.dataset(classes=2)
    options = {"network": "timm:map", "image_size": 16, "epochs": 1, "threads": 1}
    pixels, _ = tiny.shown(data.train)
    model.learn(pixels, data.train.labels.numpy(), **options, precision="32")
    network = Learner.load(model.path).network
    monkeypatch.setitem(sys.modules, "timm", None)
    assert model.info()["parameters"] == sum(
        parameter.numel() for parameter in network.parameters()
    )
    model.rename("0", "first")
    assert model.classes == ("first", "1")
    with pytest.raises(MissingExtraError, match="timm"):
        model.predict(data.test.decode(0))


@pytest.fixture(scope="module")
def real_timm():
    """Import timm; a torchvision for GPUs beside a CPU build of torch lacks two operators, which it never timm_calls here."""
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    timm = pytest.importorskip("timm", reason="the extra `timm` is not installed")
    return SimpleNamespace(timm=timm, library=library)


@pytest.mark.parametrize(
    ("name", "width", "grid"),
    [
        ("resnet10t", 512, 2048),
        ("test_vit", 64, 64),
        ("vit_tiny_patch16_224", 192, 192),
        ("test_convnext", 64, 256),
        ("swin_tiny_patch4_window7_224", 768, 3072),
    ],
)
def test_real_models(real_timm, name, width, grid):
    network = build_network(f"timm:{name}", 3, head="cosine")
    size = expected_images(f"timm:{name}")["image_size"]
    sizes = {"resnet10t": 176, "swin_tiny_patch4_window7_224": 224, "vit_tiny_patch16_224": 224}
    assert size == sizes.get(name, 160)
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    network.eval()
    with torch.no_grad():
        output = network(images)
    assert network.width == width
    shapes = [part.shape for part in (output.logits, output.pooled, output.grid)]
    assert shapes == [(2, 3), (2, width), (2, grid)]
    torch.testing.assert_close(frozen_copy(network)(images).logits, output.logits)
    _, blocks = frozen_copy(network).with_levels(images, network.level_names)
    assert len(blocks) >= 4
    torch.testing.assert_close(blocks["top"], output.pooled)


@pytest.mark.parametrize("name", ["test_vit", "swin_tiny_patch4_window7_224", "test_convnext"])
def test_real_models_can_be_exported(real_timm, tmp_path, name):
    pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")
    data, size = tiny.dataset(classes=2), 224
    learner = Learner(method="analytic", network=f"timm:{name}", train_base=False, image_size=size)
    learner.learn(resized(data.train, size))
    assert export(learner.known, tmp_path / "model.onnx")["difference"] < 1e-4


def test_the_position_embedding_of_a_vision_transformer_is_resampled_before_it_is_traced():
    model, sizes = Tokens(12), []
    model.set_input_size = lambda img_size: sizes.append(img_size)
    for dynamic in (False, True):
        model.dynamic_img_size, model.pos_embed = dynamic, nn.Parameter(torch.ones(1, 2, 6))
        TimmBackbone(model).fix_size(16)
    assert sizes == [(16, 16)]


def test_a_real_vision_transformer_reads_images_of_another_size(real_timm):
    network = build_network("timm:test_vit", 3, head="cosine").eval()
    images = torch.randn(2, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        output, blocks = network.with_levels(images, network.level_names)
    assert network.backbone.tokens
    assert all(block.shape == (2, 64) for block in blocks.values())
    torch.testing.assert_close(blocks["top"], output.pooled)
