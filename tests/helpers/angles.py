"""Pairs of subspaces at known angles of all sizes, as tensors."""

import math

import pytest
import torch

DEGREE = math.pi / 180


ANGLES = {
    "none": [0.0, 0.0, 0.0],
    "tiny": [1e-12, 3e-11, 1e-9, 2e-9, 1e-8, 1e-8, 5e-8],
    "small": [1e-6, 1e-5, 1e-4, 0.01 * DEGREE, 1e-3],
    "mixed": [0.0, 1e-9, 1e-4, 0.1, 0.5, 0.785398, 1.0, 1.5],
    "equal": [0.3, 0.3, 0.3, 0.3],
    "around the end of the series": [0.19, 0.2, 0.2002, 0.21],
    "nearly right": [45 * DEGREE, 89 * DEGREE, 89.9 * DEGREE, 89.99 * DEGREE, 89.9999 * DEGREE],
}


angles_of_all_sizes = pytest.mark.parametrize("angles", ANGLES.values(), ids=ANGLES.keys())


def bases(known, dtype=torch.float64):
    return torch.tensor(known.p, dtype=dtype), torch.tensor(known.q, dtype=dtype)


def projector(p):
    return (p @ p.mT).detach().double().numpy()
