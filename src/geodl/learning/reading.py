"""Features of a frozen network, computed while images are decoded, so that no decoded image is kept."""

import torch
from torch import Tensor

from geodl.closed_form.expansion import kept
from geodl.data.batches import evaluation, transform_of
from geodl.data.images import ArrayImages
from geodl.learning.learner import Learner
from geodl.model.classifiers import fittable, levels_of
from geodl.model.features import Features, features_of
from geodl.nets import reading_copy


class FeatureReader:
    """Computes the features of a learner's frozen network, batch by batch.

    Pooled features are float32, as trained heads and class means need them; those of the levels are
    float16, as the closed form stores them.
    """

    def __init__(self, learner: Learner) -> None:
        method, model = learner.method, learner.model
        network = model.network if model else method.initial_network(1)
        self._transform = model.transform if model else transform_of(method.config)
        self._device = learner.trainer.device
        self._levels = levels_of(fittable(method.frozen), network, method.config)
        self._network = reading_copy(network, self._device)
        self._pooled: list[Tensor] = []
        self._blocks: dict[str, list[Tensor]] = {name: [] for name in self._levels}

    def add(self, pixels: Tensor) -> None:
        """Compute the features of images: uint8 (b, 3, size, size)."""
        images = ArrayImages(pixels, torch.zeros(len(pixels), dtype=torch.int64))
        batches = evaluation(images, self._transform)
        features = features_of(self._network, batches, self._device, self._levels)
        self._pooled.append(features.pooled)
        for name, block in kept(features.levels).items():
            self._blocks[name].append(block)

    def features(self, rows: Tensor, labels: Tensor) -> Features:
        """Return the features of the images at `rows`: (N,), with their labels: (N,), and clear the reader.

        There are no logits: the head is not trained.
        """
        pooled = torch.cat(self._pooled)[rows]
        self._pooled = []
        levels = {name: torch.cat(self._blocks.pop(name))[rows] for name in self._levels}
        return Features(pooled, torch.empty(len(rows), 0), labels, levels)
