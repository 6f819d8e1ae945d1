"""From files and arrays to batches: sources, the class-incremental scenario, images, augmentation."""

from geodl.data.batches import Batch, Batches, Transform, evaluation, fit
from geodl.data.decoding import open_image
from geodl.data.images import ArrayImages, FileImages, Images, concat
from geodl.data.scenario import ClassIncremental
from geodl.data.sources import Dataset, load, scan_folder, source, sources

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
    "fit",
    "load",
    "open_image",
    "scan_folder",
    "source",
    "sources",
]
