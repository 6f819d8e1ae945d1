"""Learners with tiny options, and what they consist of."""

from typing import Any

import numpy as np
from tests.helpers import tiny

from geodl.config import SECTIONS
from geodl.data import ClassIncremental
from geodl.learning.learner import Learner
from geodl.model.metrics import Confusion

ABOUT_DATA = set(SECTIONS["Data"].model_fields)
OPTIONS = {name: value for name, value in tiny.OPTIONS.items() if name not in ABOUT_DATA}
METHODS: list[dict[str, Any]] = [
    {"method": "lucir", "distill": "geodesic"},
    {"method": "bic", "correction_epochs": 3},
    {"method": "mnemonics", "outer_steps": 2},
    {"method": "analytic", "expansion": 32, "exemplars": 2},
    {"method": "analytic", "keep_features": True, "flip": True},
    {"method": "finetune", "exemplars": 0},
]


def made(**options: Any) -> Learner:
    """Return a learner with the tiny options, some replaced."""
    return Learner(**OPTIONS | options)


def taught(scenario: ClassIncremental, phases: int = 2, **options: Any) -> Learner:
    """Return a learner that has learned the first phases."""
    learner = made(**options)
    for phase in list(scenario)[:phases]:
        learner.learn(phase.train)
    return learner


def state(learner: Learner) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return all that a learner consists of: the bytes of its tensors, and its record."""
    tensors = learner.known.to_tensors()
    found = {name: tensor.contiguous().numpy().tobytes() for name, tensor in tensors.items()}
    return found, learner.known.record()


def counts(found: dict[str, Confusion]) -> dict[str, list[list[int]]]:
    return {name: confusion.counts.tolist() for name, confusion in found.items()}


def assert_same_predictions(one: Any, other: Any, images: Any, **how: Any) -> None:
    """Check that two of a learner or classifier give the same probabilities."""
    found = (each.predict(images, **how).probabilities for each in (one, other))
    np.testing.assert_array_equal(*found)
