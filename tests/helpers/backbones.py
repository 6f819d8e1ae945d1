"""A stand-in for timm, with models that give maps or tokens."""

import sys
from types import ModuleType, SimpleNamespace

from torch import nn


class StandIn(nn.Module):
    """The part of a timm model that is used: features, a head that pools, and what they look like."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.num_features = 6
        self.output_fmt = {"map": "NCHW", "swin": "NHWC", "vit": "NLC"}[kind]
        self.conv = nn.Conv2d(3, 6, 4, stride=4)

    def forward_features(self, x):
        assert x.shape[2:] == (16, 16), "Input height doesn't match model"
        features = self.conv(x)
        if self.output_fmt == "NLC":
            return features.flatten(2).transpose(1, 2)
        return features.permute(0, 2, 3, 1) if self.output_fmt == "NHWC" else features

    def forward_head(self, features, pre_logits):
        assert pre_logits
        return features[:, 0]


def stand_in(monkeypatch):
    """Put a stand-in for timm in place; return the names and options that models are made with."""
    made = []

    def create_model(name, **options):
        if options.pop("dynamic_img_size", False) and name != "vit":
            raise TypeError("unexpected keyword argument 'dynamic_img_size'")
        if "." in name:
            raise RuntimeError("Invalid pretrained tag")
        made.append((name, options))
        return StandIn(name)

    module = ModuleType("timm")
    module.is_model = lambda name: name.partition(".")[0] in ("map", "swin", "vit")
    module.list_models = lambda: ["map", "swin", "vit"]
    module.create_model = create_model
    module.get_pretrained_cfg = lambda name: SimpleNamespace(
        input_size=(3, 16, 16), mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4)
    )
    monkeypatch.setitem(sys.modules, "timm", module)
    return made
