"""Data: sources, the class-incremental scenario, images, augmented batches.

Importing the package registers its sources.
"""

from geodl.core.decoding import open_image
from geodl.data import arrays, cifar, hub  # noqa: F401  # registers their sources
from geodl.data.batches import Batch, Batches, Transform, evaluation, resized
from geodl.data.dataset import Dataset, load, source, sources
from geodl.data.folder import scan_folder
from geodl.data.images import ArrayImages, FileImages, Images, concat
from geodl.data.scenario import ClassIncremental

__all__ = [
    "ArrayImages",
    "Batch",
    "Batches",
    "ClassIncremental",
    "Dataset",
    "FileImages",
    "Images",
    "Transform",
    "concat",
    "evaluation",
    "load",
    "open_image",
    "resized",
    "scan_folder",
    "source",
    "sources",
]
