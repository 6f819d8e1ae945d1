"""A network is a backbone and a head; networks are built by name, and frozen copies of them teach."""

from collections.abc import Callable
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from geodl.config import derive
from geodl.errors import ConfigError, DataError, MissingExtraError
from geodl.nets import resnet
from geodl.nets.heads import CosineHead, Head, LinearHead

BACKBONES: dict[str, Callable[[], nn.Module]] = {
    "convnet": resnet.convnet,
    "resnet8": resnet.resnet8,
    "resnet18": resnet.resnet18,
    "resnet20": resnet.resnet20,
    "resnet32": resnet.resnet32,
}


class Output(NamedTuple):
    """What a network gives for a batch of B images."""

    logits: Tensor
    """(B, C) corrected logits of the head."""
    pooled: Tensor
    """(B, d) features, averaged over the whole map: for the head, herding, class means and cosine distillation."""
    grid: Tensor
    """(B, 4 d) features, averaged over the four quarters of the map: for geodesic distillation."""


class Network(nn.Module):
    """A backbone with `width` features, giving a map (B, d, h, w) or pooled features (B, d), under a growing head."""

    def __init__(self, backbone: nn.Module, head: Head) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.width = head.width

    def forward(self, x: Tensor) -> Output:
        """Classify images x: (B, 3, H, W)."""
        features = self.backbone(x)
        pooled = _pool(features)
        has_map = features.ndim == 4 and features.shape[2] * features.shape[3] > 1
        grid = F.adaptive_avg_pool2d(features, 2).flatten(1) if has_map else pooled
        return Output(self.head(pooled), pooled, grid)

    def features(self, x: Tensor) -> Tensor:
        """Give the pooled features (B, d) of images x: (B, 3, H, W)."""
        return _pool(self.backbone(x))


class FrozenNetwork(Network):
    """A teacher: always in eval mode, and never part of an autograd graph."""

    def train(self, mode: bool = True) -> "FrozenNetwork":
        """Stay in eval mode, also when a module that holds this one is put in train mode."""
        super().train(False)
        return self

    # Not inference_mode: a loss must be able to save the teacher's features for the student's backward pass.
    @torch.no_grad()
    def forward(self, x: Tensor) -> Output:
        """Classify images x: (B, 3, H, W)."""
        return super().forward(x)

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        """Give the pooled features (B, d) of images x: (B, 3, H, W)."""
        return super().features(x)


class TimmBackbone(nn.Module):
    """A timm model without its classifier: a map (B, d, h, w), or pooled features (B, d) where it has no map (ViT).

    Its last activation is whatever the model has: only our own ResNets leave out the last ReLU.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.width: int = model.num_features
        self.channels_last = getattr(model, "output_fmt", "NCHW") == "NHWC"  # Swin's maps are (B, h, w, d)

    def forward(self, x: Tensor) -> Tensor:
        """Map x: (B, 3, H, W) to (B, d, h, w) or (B, d)."""
        features: Tensor = self.model.forward_features(x)
        if features.ndim == 4:
            return features.permute(0, 3, 1, 2) if self.channels_last else features
        pooled: Tensor = self.model.forward_head(features, pre_logits=True)
        return pooled


def networks() -> list[str]:
    """Name the networks that can be built, besides `timm:NAME`."""
    return sorted(BACKBONES)


def build_network(
    name: str,
    classes: int,
    *,
    head: Literal["cosine", "linear"],
    scale: float = 1.0,
    seed: int = 0,
    weights: Path | None = None,
    pretrained: bool = False,
) -> Network:
    """Build a network by name: one of `networks()` or `timm:NAME`; the same seed gives the same weights.

    `weights` is a safetensors file with the backbone's weights; `pretrained` fetches timm's own, for `timm:NAME` only.
    The convolutions are laid out channels_last, which is the fast way on CPUs.
    """
    if head not in ("cosine", "linear"):
        raise ConfigError(f"unknown head {head!r}; allowed are cosine and linear")
    if pretrained and not name.startswith("timm:"):
        raise ConfigError(f"pretrained is True for network {name!r}; it is allowed for timm:NAME only")
    # Modules draw their first weights from torch's own generator: lend it the seed, then give it back as it was.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive(seed, "backbone"))
        backbone = _timm_backbone(name.removeprefix("timm:"), pretrained) if name.startswith("timm:") else _own(name)
    if weights is not None:
        _load_backbone(backbone, weights)
    width: int = backbone.width  # type: ignore[assignment]  # every backbone has it
    key = derive(seed, "head")
    rows = CosineHead(width, classes, scale, seed=key) if head == "cosine" else LinearHead(width, classes, seed=key)
    return Network(backbone, rows).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def frozen_copy(network: Network) -> FrozenNetwork:
    """Copy a network as a teacher: eval mode, no gradients, all head rows together, batch norm folded into the convs."""
    copy = deepcopy(network)
    copy.head.thaw()
    if isinstance(copy.backbone, resnet.ResNet):
        resnet.fold_batch_norm(copy.backbone)
    teacher = FrozenNetwork(copy.backbone, copy.head)
    teacher.requires_grad_(False)
    return teacher.train(False)


def parameter_count(module: nn.Module) -> int:
    """Count the numbers that training can change."""
    return sum(parameter.numel() for parameter in module.parameters())


def _pool(features: Tensor) -> Tensor:
    return features.mean(dim=(2, 3)) if features.ndim == 4 else features


def _own(name: str) -> nn.Module:
    if name not in BACKBONES:
        raise ConfigError(f"unknown network {name!r}; allowed are {', '.join(networks())} and timm:NAME")
    return BACKBONES[name]()


def _timm_backbone(name: str, pretrained: bool) -> nn.Module:
    try:
        import timm
    except ImportError as error:
        raise MissingExtraError("timm", f"the network timm:{name}") from error
    except RuntimeError as error:  # a torchvision that was built for another torch
        raise ConfigError(f"timm is installed but does not work beside this torch: {error}") from error
    if not timm.is_model(name):
        near = ", ".join(f"timm:{match}" for match in get_close_matches(name, timm.list_models(), n=3, cutoff=0.0))
        raise ConfigError(f"timm has no model {name!r}; the names nearest to it are {near}")
    try:
        return TimmBackbone(timm.create_model(name, pretrained=pretrained, num_classes=0))
    except (OSError, RuntimeError) as error:  # an unknown tag, or weights that cannot be fetched
        raise ConfigError(f"timm cannot build {name!r}: {error}") from error


def _load_backbone(backbone: nn.Module, file: Path) -> None:
    """Load weights by name; the file may hold more than the backbone, such as the classifier it was trained with."""
    try:
        found = load_file(file)
    except (OSError, SafetensorError) as error:
        raise DataError(f"weights {file} cannot be read as a safetensors file: {error}") from error
    target = backbone.model if isinstance(backbone, TimmBackbone) else backbone
    wanted = target.state_dict()
    wrong = [key for key in wanted if key not in found or found[key].shape != wanted[key].shape]
    if wrong:
        raise DataError(
            f"weights {file} do not fit the network: {len(wrong)} of {len(wanted)} tensors are missing or of another "
            f"shape, first {wrong[0]}"
        )
    target.load_state_dict({key: found[key] for key in wanted})
