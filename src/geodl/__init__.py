"""Class-incremental learning along the geodesic between old and new feature subspaces.

The names below are loaded on first use, so that ``import geodl`` costs nothing and needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

if TYPE_CHECKING:
    from geodl import geometry
    from geodl.app.classifier import IncrementalClassifier
    from geodl.bench.experiment import run
    from geodl.core.errors import GeodlError
    from geodl.data import load
    from geodl.data.scenario import ClassIncremental
    from geodl.learning.hub import push
    from geodl.learning.learner import Learner
    from geodl.losses import CosineDistillation, GeodesicDistillation, LogitDistillation
    from geodl.model.estimators import ClosedFormClassifier, ImageFeatures

_HOMES = {
    "ClassIncremental": "geodl.data.scenario",
    "ClosedFormClassifier": "geodl.model.estimators",
    "CosineDistillation": "geodl.losses",
    "GeodesicDistillation": "geodl.losses",
    "GeodlError": "geodl.core.errors",
    "ImageFeatures": "geodl.model.estimators",
    "IncrementalClassifier": "geodl.app.classifier",
    "Learner": "geodl.learning.learner",
    "LogitDistillation": "geodl.losses",
    "load": "geodl.data",
    "push": "geodl.learning.hub",
    "run": "geodl.bench.experiment",
}

__all__ = [
    "ClassIncremental",
    "ClosedFormClassifier",
    "CosineDistillation",
    "GeodesicDistillation",
    "GeodlError",
    "ImageFeatures",
    "IncrementalClassifier",
    "Learner",
    "LogitDistillation",
    "__version__",
    "geometry",
    "load",
    "push",
    "run",
]


def __getattr__(name: str) -> Any:
    if name == "geometry":
        return import_module("geodl.geometry")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'geodl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
