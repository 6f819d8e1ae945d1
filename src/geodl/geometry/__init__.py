"""Subspaces of feature batches and the geodesic flow between them on the Grassmann manifold; see docs/geometry.md."""

from geodl.geometry.flow import GeodesicFlow
from geodl.geometry.subspaces import (
    GeometryError,
    common_subspaces,
    geodesic_distance,
    principal_angles,
    subspace,
    unit,
    working_dtype,
)

__all__ = [
    "GeodesicFlow",
    "GeometryError",
    "common_subspaces",
    "geodesic_distance",
    "principal_angles",
    "subspace",
    "unit",
    "working_dtype",
]
