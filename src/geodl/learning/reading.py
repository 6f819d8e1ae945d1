"""Features of a network that stands still, taken while images are decoded: no picture is held for them."""

import torch
from torch import Tensor

from geodl.closed_form.expansion import kept
from geodl.data.batches import evaluation, transform_of
from geodl.data.images import ArrayImages
from geodl.learning.algorithm import initial_network, levels_of
from geodl.learning.learner import Learner
from geodl.model.features import Features, features_of
from geodl.nets import reading_copy


class FeatureReader:
    """What a learner's frozen network makes of images that come in parts.

    Pooled features are float32, as trained heads and class means need them; those of the levels are
    float16, as the closed form keeps them.
    """

    def __init__(self, learner: Learner) -> None:
        method, model = learner.method, learner.model
        network = model.network if model else initial_network(method, 1)
        self._transform = model.transform if model else transform_of(method.config)
        self._device = learner.trainer.device
        self._levels = levels_of(method, network)
        self._network = reading_copy(network, self._device)
        self._pooled: list[Tensor] = []
        self._blocks: dict[str, list[Tensor]] = {name: [] for name in self._levels}

    def add(self, pixels: Tensor) -> None:
        """Take the features of images: uint8 (b, 3, size, size)."""
        images = ArrayImages(pixels, torch.zeros(len(pixels), dtype=torch.int64))
        batches = evaluation(images, self._transform)
        found = features_of(self._network, batches, self._device, self._levels)
        self._pooled.append(found.pooled)
        for name, block in kept(found.levels).items():
            self._blocks[name].append(block)

    def features(self, rows: Tensor, labels: Tensor) -> Features:
        """Return the features of the images at these places (N,), whose labels are given; the parts are dropped.

        There are no logits: the head of a network that is not trained has nothing to say.
        """
        pooled = torch.cat(self._pooled)[rows]
        self._pooled = []
        levels = {name: torch.cat(self._blocks.pop(name))[rows] for name in self._levels}
        return Features(pooled, torch.empty(len(rows), 0), labels, levels)
