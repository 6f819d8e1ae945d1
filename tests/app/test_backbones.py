"""Backbones of timm, pretrained or with weights from a file."""

import torch
from safetensors.torch import save_file
from tests.helpers.folders import QUICK

from geodl.app import state
from geodl.store import Directory


def test_a_pretrained_backbone_comes_with_its_size_and_colors(classifier, weeks, timm_calls):
    classifier.learn(weeks[0], network="timm:map", **QUICK)
    now = state.load(Directory(classifier.path))
    found = now.transform
    assert (found.size, found.mean, found.std) == (16, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    assert timm_calls[0][1]["pretrained"] is True
    assert now.model.network is not None  # built when it is first asked for
    assert timm_calls[-1][1]["pretrained"] is False  # loading a model fetches nothing
    classifier.learn(weeks[1], network="timm:map", **QUICK)
    assert len(classifier.predict(weeks[1])) == 30


def test_weights_from_a_file(classifier, weeks, timm_calls, tmp_path):
    weights, path = torch.full((6, 3, 4, 4), 0.25), tmp_path / "w.safetensors"
    save_file({"conv.weight": weights, "conv.bias": torch.zeros(6)}, path)
    classifier.learn(weeks[0], network="timm:map", weights=path, lr=1e-12, **QUICK)
    assert timm_calls[0][1]["pretrained"] is False
    network = state.load(Directory(classifier.path)).model.network
    torch.testing.assert_close(network.backbone.model.conv.weight.detach(), weights)
