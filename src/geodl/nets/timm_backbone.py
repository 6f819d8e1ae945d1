"""Models of timm by name, as backbones."""

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
"""Stages of a model that are levels of its own."""


class TimmBackbone(Backbone):
    """A timm model without its classifier: a map (B, d, h, w), or pooled features (B, d) where it has no map (ViT).

    Its last activation is whatever the model has: only our own ResNets leave out the last ReLU. Its levels are the stages
    that timm knows of, where it can give them in one pass, and then "top", which is what the classifier would be given. Of a
    model with a class token (ViT, DINOv2) a level is the token of a block (LayUP, Ahrens et al., TMLR 2024), not a map.
    """

    foldable = False  # the order in which a foreign model registers its layers says nothing

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.width = model.num_features
        # Swin's maps are (B, h, w, d).
        self.channels_last = getattr(model, "output_fmt", "NCHW") == "NHWC"
        known = len(model.feature_info) if hasattr(model, "forward_intermediates") else 0
        # Every third of a ViT's twelve blocks is enough: MOST at most, evenly spread, the last one among them.
        self.stages = list(range(known))[:: -max(1, -(-known // MOST))][::-1]
        self.tokens = known > 0 and _gives_tokens(model)
        cells = 1 if self.tokens else 2
        self.level_grids = {f"stage{stage + 1}": cells for stage in self.stages} | {"top": 1}

    def forward(self, x: Tensor) -> Tensor:
        """Map x: (B, 3, H, W) to (B, d, h, w) or (B, d)."""
        with _sized(x):
            return self._top(self.model.forward_features(x))

    def levels(self, x: Tensor) -> dict[str, Tensor]:
        """Return the maps (B, d, h, w) of all levels for images x: (B, 3, H, W); features (B, d) where there is no map."""
        if not self.stages:
            return {"top": self(x)}
        how = {"return_prefix_tokens": True} if self.tokens else {}
        # It gives the maps as (B, d, h, w) whatever the model's own layout is.
        with _sized(x):
            features, maps = self.model.forward_intermediates(x, indices=self.stages, **how)
            if self.tokens:  # each comes with its map; the class token is the first one
                maps = [tokens[:, 0] for _, tokens in maps]
            return dict(zip(self.level_grids, [*maps, self._top(features)], strict=True))

    def published_name(self, key: str) -> str:
        """Return timm's own name of a tensor."""
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
    """Return whether a model has a class token and gives that of each block."""
    given = signature(model.forward_intermediates).parameters
    return getattr(model, "cls_token", None) is not None and "return_prefix_tokens" in given


@contextmanager
def _sized(x: Tensor) -> Iterator[None]:
    """Turn what a model asserts of the size of its images x: (B, 3, H, W) into a ConfigError."""
    try:
        yield
    except AssertionError as error:
        size = " x ".join(str(side) for side in x.shape[2:])
        raise ConfigError(f"image_size: images of {size} given: {one_line(error)}") from error


def timm_backbone(name: str, *, pretrained: bool) -> TimmBackbone:
    """Build timm's model `name`, with the weights that timm publishes if `pretrained`; a ViT for images of any size."""
    timm = _import(name)
    options = {"pretrained": pretrained, "num_classes": 0}
    try:
        try:
            model = timm.create_model(name, dynamic_img_size=True, **options)
        except TypeError:  # it has no such option
            model = timm.create_model(name, **options)
        return TimmBackbone(model)
    except (OSError, RuntimeError) as error:  # an unknown tag, or weights that cannot be fetched
        raise ConfigError(f"timm cannot build {name!r}: {error}") from error


def check_timm(name: str) -> None:
    """Raise a ConfigError where timm has no model `name`."""
    timm = _import(name)
    if not timm.is_model(name):
        matches = get_close_matches(name, timm.list_models(), n=3, cutoff=0.0)
        near = ", ".join(f"timm:{match}" for match in matches)
        raise ConfigError(f"timm has no model {name!r}; the names nearest to it are {near}")


def expected_by_timm(name: str) -> dict[str, Any]:
    """Return size and colors (`image_size`, `mean`, `std`) of the images that timm's model `name` was trained with."""
    found = _import(name).get_pretrained_cfg(name)
    if found is None:
        return {"image_size": 224}
    size = int(found.input_size[-1])
    return {"image_size": size, "mean": tuple(found.mean), "std": tuple(found.std)}


def _import(name: str) -> Any:
    try:
        import timm
    except ImportError as error:
        raise MissingExtraError("timm", f"the network timm:{name}") from error
    except RuntimeError as error:  # a torchvision that was built for another torch
        raise ConfigError(f"timm does not work beside this torch: {error}") from error
    return timm
