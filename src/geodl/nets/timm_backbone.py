"""Models of timm as backbones."""

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from inspect import signature
from typing import Any

from torch import Tensor

from geodl.core.errors import ConfigError, MissingExtraError
from geodl.core.text import one_line
from geodl.nets.backbone import Backbone

MOST = 5
"""Maximum number of stages of a model that become levels."""


class TimmBackbone(Backbone):
    """A timm model without its classifier: a map (B, d, h, w), or pooled features (B, d) if it has no map (ViT).

    It keeps its last activation: only our own ResNets omit the last ReLU. Its levels are the stages that timm can compute in
    one pass, and "top", the input of the classifier. For a model with a class token (ViT, DINOv2), a level is the token of a
    block (LayUP, Ahrens et al., TMLR 2024), not a map.
    """

    foldable = False  # layers may not be registered in the order in which they are applied

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.width = model.num_features
        # Swin's maps are (B, h, w, d).
        self.channels_last = getattr(model, "output_fmt", "NCHW") == "NHWC"
        known = len(model.feature_info) if hasattr(model, "forward_intermediates") else 0
        # At most MOST, evenly spread, including the last: every third of a ViT's twelve blocks.
        self.stages = list(range(known))[:: -max(1, -(-known // MOST))][::-1]
        self.tokens = known > 0 and _gives_tokens(model)
        cells = 1 if self.tokens else 2
        self.level_grids = {f"stage{stage + 1}": cells for stage in self.stages} | {"top": 1}

    def forward(self, x: Tensor) -> Tensor:
        """Map x: (B, 3, H, W) to (B, d, h, w) or (B, d)."""
        with _sized(x):
            return self._top(self.model.forward_features(x))

    def levels(self, x: Tensor) -> dict[str, Tensor]:
        """Return the maps (B, d, h, w) of all levels for images x: (B, 3, H, W); features (B, d) without a map."""
        if not self.stages:
            return {"top": self(x)}
        options = {"return_prefix_tokens": True} if self.tokens else {}
        # The maps are (B, d, h, w), whatever the model's own layout is.
        with _sized(x):
            features, maps = self.model.forward_intermediates(x, indices=self.stages, **options)
            if self.tokens:  # pairs of map and prefix tokens; the class token is the first of these
                maps = [tokens[:, 0] for _, tokens in maps]
            return dict(zip(self.level_grids, [*maps, self._top(features)], strict=True))

    def published_name(self, key: str) -> str:
        """Return timm's name of a tensor."""
        return key.removeprefix("model.")

    def fix_size(self, size: int) -> None:
        """Resample the position embedding of a ViT once: ONNX cannot."""
        dynamic = getattr(self.model, "dynamic_img_size", False)
        if dynamic and getattr(self.model, "pos_embed", None) is not None:
            self.model.set_input_size(img_size=(size, size))

    def _top(self, features: Tensor) -> Tensor:
        if features.ndim == 4:
            return features.permute(0, 3, 1, 2) if self.channels_last else features
        pooled: Tensor = self.model.forward_head(features, pre_logits=True)
        return pooled


def _gives_tokens(model: Any) -> bool:
    """Return whether a model has a class token and can return that of each block."""
    options = signature(model.forward_intermediates).parameters
    return getattr(model, "cls_token", None) is not None and "return_prefix_tokens" in options


@contextmanager
def _sized(x: Tensor) -> Iterator[None]:
    """Turn a model's assertion about the size of images x: (B, 3, H, W) into a ConfigError."""
    try:
        yield
    except AssertionError as error:
        size = " x ".join(str(side) for side in x.shape[2:])
        raise ConfigError(f"image_size: images of {size} do not fit: {one_line(error)}") from error


def timm_backbone(name: str, *, pretrained: bool) -> TimmBackbone:
    """Build timm's model `name`, with timm's weights if `pretrained`; a ViT is built for images of any size."""
    timm = _import(name)
    options = {"pretrained": pretrained, "num_classes": 0}
    try:
        try:
            model = timm.create_model(name, dynamic_img_size=True, **options)
        except TypeError:  # without this option
            model = timm.create_model(name, **options)
        return TimmBackbone(model)
    except (OSError, RuntimeError) as error:  # an unknown tag, or weights that cannot be fetched
        raise ConfigError(f"timm cannot build {name!r}: {error}") from error


def check_timm(name: str) -> None:
    """Raise a ConfigError if timm has no model `name`."""
    timm = _import(name)
    if not timm.is_model(name):
        matches = get_close_matches(name, timm.list_models(), n=3, cutoff=0.0)
        near = ", ".join(f"timm:{match}" for match in matches)
        raise ConfigError(f"timm has no model {name!r}; similar names are {near}")


def expected_by_timm(name: str) -> dict[str, Any]:
    """Return the image options (`image_size`, `mean`, `std`) that timm's model `name` was trained with."""
    config = _import(name).get_pretrained_cfg(name)
    if config is None:
        return {"image_size": 224}
    size = int(config.input_size[-1])
    return {"image_size": size, "mean": tuple(config.mean), "std": tuple(config.std)}


def _import(name: str) -> Any:
    try:
        import timm
    except ImportError as error:
        raise MissingExtraError("timm", f"the network timm:{name}") from error
    except RuntimeError as error:  # a torchvision that was built for another torch
        raise ConfigError(f"timm does not work with this torch: {error}") from error
    return timm
