"""Class-incremental learning along the geodesic between old and new feature subspaces.

The names below are loaded on first use, so that ``import geodl`` costs nothing and needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from geodl.classifier import IncrementalClassifier
    from geodl.losses import CosineDistillation, GeodesicDistillation, LogitDistillation

_HOMES = {
    "IncrementalClassifier": "geodl.classifier",
    "GeodesicDistillation": "geodl.losses",
    "CosineDistillation": "geodl.losses",
    "LogitDistillation": "geodl.losses",
}

__all__ = ["CosineDistillation", "GeodesicDistillation", "IncrementalClassifier", "LogitDistillation", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'geodl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
