"""Networks, each a backbone and a head: building them by name, and frozen copies as teachers."""

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from geodl.core.errors import ConfigError
from geodl.core.keys import derive
from geodl.core.text import listed
from geodl.nets import efficientnet_lite, resnet
from geodl.nets.backbone import BACKBONES, OWN, Backbone, Own, as_backbone, fold_batch_norms
from geodl.nets.heads import CosineHead, Head, LinearHead
from geodl.nets.inference import by_onnxruntime
from geodl.nets.timm_backbone import check_timm, expected_by_timm, timm_backbone
from geodl.nets.weights import load_weights

log = logging.getLogger("geodl")

HeadKind = Literal["cosine", "linear"]

TIMM = "timm:"
PUBLISHED = tuple(efficientnet_lite.BACKBONES)
"""Networks whose ImageNet weights the extra `pretrained` installs."""
BUILT_IN: dict[str, Callable[[], Backbone]] = {**efficientnet_lite.BACKBONES, **resnet.BACKBONES}
for _name, _backbone in BUILT_IN.items():
    BACKBONES.add(_name, _backbone)


class Output(NamedTuple):
    """The output of a network for a batch of B images."""

    logits: Tensor
    """(B, C) corrected logits of the head."""
    pooled: Tensor
    """(B, d) features, averaged over the whole map: for the head, herding, class means and cosine distillation."""
    grid: Tensor
    """(B, 4 d) features, averaged over the four quarters of the map: for geodesic distillation."""


class Network(nn.Module):
    """A backbone with `width` features, as a map (B, d, h, w) or pooled (B, d), and a growing head."""

    def __init__(self, backbone: Backbone, head: Head) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.width = head.width

    def forward(self, x: Tensor) -> Output:
        """Classify images x: (B, 3, H, W)."""
        return self._output(self.backbone(x))

    def _output(self, features: Tensor) -> Output:
        # Averaged in float32, even if the map has half precision.
        features = _at_least_float32(features)
        pooled = _pool(features)
        # In float32 too: logits with 8 significant bits tie, and argmax resolves ties for the older class.
        with torch.autocast(pooled.device.type, enabled=False):
            logits = self.head(pooled)
        return Output(logits, pooled, _on_grid(features, 2))

    def features(self, x: Tensor) -> Tensor:
        """Return the pooled features (B, d) of images x: (B, 3, H, W)."""
        return _pool(_at_least_float32(self.backbone(x)))

    def with_levels(self, x: Tensor, levels: Sequence[str]) -> tuple[Output, dict[str, Tensor]]:
        """Classify images x: (B, 3, H, W); also return the features of some levels: `stage2`, or `stage2@4` on a 4 x 4 grid."""
        maps = self.backbone.levels(x)
        features = {}
        for name in levels:
            level, cells = self.level_and_cells(name)
            features[name] = _on_grid(_at_least_float32(maps[level]), cells)
        return self._output(list(maps.values())[-1]), features

    def move_last_alone(self) -> None:
        """Make only the head and the last stages of the backbone trainable."""
        self.backbone.requires_grad_(False)
        for parameter in self.backbone.last_parameters():
            parameter.requires_grad_(True)

    def level_and_cells(self, name: str) -> tuple[str, int]:
        """Return the level of a name, and n for a grid of n x n cells, by default the backbone's own."""
        level, at, cells = name.partition("@")
        if level not in self.level_names:
            raise ConfigError(f"unknown level {name!r}; allowed are {', '.join(self.level_names)}")
        if not at:
            return level, self.backbone.level_grids[level]
        if not (cells.isascii() and cells.isdigit() and 1 <= int(cells) <= 64):
            raise ConfigError(
                f"level {name!r}: expected a number of cells per side, 1 to 64, after @"
            )
        return level, int(cells)

    @property
    def level_names(self) -> tuple[str, ...]:
        """The names of the levels, from shallow to deep."""
        return tuple(self.backbone.level_grids)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the state of a network of the same architecture, whose head may have other frozen rows."""
        self.head.thaw()
        order = tensors.get("head.order")
        if order is not None:
            self.head.freeze(order >= len(tensors["head.weight"]))
        self.load_state_dict(dict(tensors))


class FrozenNetwork(Network):
    """A teacher: always in eval mode, never part of an autograd graph."""

    def train(self, mode: bool = True) -> "FrozenNetwork":
        """Stay in eval mode, even if a module that contains this one is set to train mode."""
        super().train(False)
        return self

    # Not inference_mode: the student's backward pass needs the teacher's features.
    forward = torch.no_grad()(Network.forward)
    features = torch.no_grad()(Network.features)
    with_levels = torch.no_grad()(Network.with_levels)


def build_network(
    name: str | Own,
    classes: int,
    *,
    head: HeadKind,
    scale: float = 1.0,
    seed: int = 0,
    weights: Path | None = None,
    pretrained: bool = False,
) -> Network:
    """Build a network: `build_backbone`, then `with_head`."""
    backbone = build_backbone(name, seed=seed, weights=weights, pretrained=pretrained)
    return with_head(backbone, classes, head=head, scale=scale, seed=seed)


def build_backbone(
    name: str | Own, *, seed: int = 0, weights: Path | None = None, pretrained: bool = False
) -> Backbone:
    """Build a backbone by name (one of `BACKBONES` or `timm:NAME`) or from a module; equal seeds give equal weights.

    `weights` is a file (safetensors, .pth or .pt). `pretrained` loads published weights: from the extra `pretrained` for
    efficientnet-lite0 and -lite2, downloaded by timm for `timm:NAME`. Convolutions have the memory format channels_last,
    which is faster on CPUs.
    """
    check_network(name, pretrained=pretrained and weights is None)
    # Modules draw initial weights from torch's global generator: seed it, then restore its state.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive(seed, "backbone"))
        if isinstance(name, str) and name.startswith(TIMM):
            backbone: Backbone = timm_backbone(name.removeprefix(TIMM), pretrained=pretrained)
        else:
            backbone = as_backbone(BACKBONES[name] if isinstance(name, str) else name)
    if weights is not None:
        unused = load_weights(backbone, weights, BUILT_IN)
        if unused:
            log.warning("weights %s: not used: %s", weights, listed(unused))
    elif pretrained and (published := backbone.published_weights()):
        load_weights(backbone, published, BUILT_IN)
    return backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def with_head(
    backbone: Backbone, classes: int, *, head: HeadKind, scale: float = 1.0, seed: int = 0
) -> Network:
    """Return a backbone with a new head; equal seeds give equal rows."""
    if head not in ("cosine", "linear"):
        raise ConfigError(f"unknown head {head!r}; allowed are cosine and linear")
    key = derive(seed, "head")
    rows: Head = LinearHead(backbone.width, classes, seed=key)
    if head == "cosine":
        rows = CosineHead(backbone.width, classes, scale, seed=key)
    return Network(backbone, rows)


def check_network(name: str | Own, *, pretrained: bool = False) -> None:
    """Raise a ConfigError for a network that cannot be built, without reading or building anything."""
    if callable(name):  # includes modules
        return
    if isinstance(name, str) and name.startswith(OWN):
        raise ConfigError(
            f"network = {name!r}: your own module cannot be built by name; "
            "pass it to Learner.load(path, network=...)"
        )
    if not isinstance(name, str) or not (name.startswith(TIMM) or name in BACKBONES):
        allowed = f"{', '.join(sorted(BACKBONES))} and timm:NAME"
        raise ConfigError(f"network = {name!r}: allowed values are {allowed}")
    if pretrained and not name.startswith((TIMM, *PUBLISHED)):
        allowed = f"{', '.join(PUBLISHED)} and timm:NAME"
        raise ConfigError(f"pretrained with network = {name!r}: allowed values are {allowed}")
    if name.startswith(TIMM):
        check_timm(name.removeprefix(TIMM))


def expected_images(name: str) -> dict[str, Any]:
    """Return the image options (`image_size`, `mean`, `std`) that a pre-trained network expects; {} for other networks."""
    if name.startswith(TIMM):
        return expected_by_timm(name.removeprefix(TIMM))
    return efficientnet_lite.expected(name) if name in PUBLISHED else {}


def folded(network: Network) -> Network:
    """Return a copy of a network for inference: in eval mode, batch norms folded into the convolutions before them."""
    copy = deepcopy(network).eval()
    if copy.backbone.foldable:
        fold_batch_norms(copy.backbone)
    return copy


def reading_copy(network: Network, device: torch.device | str) -> Network:
    """Return a folded copy of a network for reading features on a device, with the fastest runtime there."""
    copy = folded(network).to(device)
    if torch.device(device).type == "cpu":
        copy.backbone = by_onnxruntime(copy.backbone)
    return copy


def frozen_copy(network: Network) -> FrozenNetwork:
    """Return a copy of a network as a teacher: eval mode, no gradients, no frozen rows in the head, batch norms folded."""
    copy = folded(network)
    copy.head.thaw()
    teacher = FrozenNetwork(copy.backbone, copy.head)
    teacher.requires_grad_(False)
    return teacher.train(False)


def _pool(features: Tensor) -> Tensor:
    return features.mean(dim=(2, 3)) if features.ndim == 4 else features


def _on_grid(features: Tensor, cells: int) -> Tensor:
    """Average a map (B, d, h, w) to cells x cells, at most its own size, and flatten it; (B, d) is returned unchanged."""
    if features.ndim != 4:
        return features
    height, width = map(int, features.shape[2:])  # numbers, also during tracing
    rows, columns = min(cells, height), min(cells, width)
    # ONNX has no adaptive pooling.
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        left, right = _averages(rows, height), _averages(columns, width)
        return (left @ features @ right.T).flatten(1)
    return F.adaptive_avg_pool2d(features, (rows, columns)).flatten(1)


def _averages(cells: int, pixels: int) -> Tensor:
    """Return the matrix (cells, pixels) of adaptive average pooling."""
    table = []
    for cell in range(cells):
        start, end = cell * pixels // cells, -(-(cell + 1) * pixels // cells)
        inside = end - start
        table.append([0.0] * start + [1 / inside] * inside + [0.0] * (pixels - end))
    return torch.tensor(table)


def _at_least_float32(features: Tensor) -> Tensor:
    return features.to(torch.promote_types(features.dtype, torch.float32))
