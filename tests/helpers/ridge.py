"""Closed-form learning by plain numpy in float64, and expanded features to learn from."""

import math

import numpy as np
import torch
from hypothesis import strategies as st

from geodl.closed_form.primal import Statistics

seeds = st.integers(0, 2**32 - 1)


gammas = st.sampled_from([1e-3, 1e-2, 0.1, 1.0])


def draw(seed, images=40, width=12, classes=4):
    """Return expanded features and labels in which every class occurs."""
    rng = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(classes), rng.integers(0, classes, images - classes)])
    centers = rng.normal(size=(classes, width))
    h = np.maximum(centers[labels] + rng.normal(size=(images, width)), 0)
    return torch.tensor(h), torch.tensor(rng.permuted(labels))


def refit(h, y, ridge, weights=None):
    """Fit a head by weighted least squares on rows stacked with the ridge: no normal equations, no Cholesky."""
    root = np.ones(len(h)) if weights is None else np.sqrt(weights)
    stacked = np.vstack([root[:, None] * h, math.sqrt(ridge) * np.eye(h.shape[1])])
    goal = np.vstack([root[:, None] * y, np.zeros((h.shape[1], y.shape[1]))])
    return np.linalg.lstsq(stacked, goal, rcond=None)[0]


def ridge_of(h, gamma, weights=None):
    squares = np.square(h).sum(1)
    return gamma * (squares if weights is None else weights * squares).sum() / h.shape[1]


def close(found, expected, tolerance=1e-8, size=0.0):
    """Compare to `tolerance` of the largest number, or of `size`."""
    found, expected = (x.numpy() if isinstance(x, torch.Tensor) else x for x in (found, expected))
    assert found.shape == expected.shape
    largest = max(np.abs(expected).max(), size)
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * largest)


def statistics_of(h, labels, classes=None, cuts=()):
    """Add images phase by phase, each phase knowing only the classes seen so far."""
    statistics, seen = Statistics.empty(h.shape[1]), 0
    for rows in torch.arange(len(h)).tensor_split(sorted(cuts)):
        if len(rows):
            seen = max(seen, int(labels[rows].max()) + 1)
            statistics.add(h[rows], labels[rows], seen if classes is None else classes)
    return statistics
