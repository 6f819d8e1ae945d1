"""The options of a run: one validated definition for the command line, TOML files and Python.

`RunConfig` declares the options of every run. A part (a method, a distillation, ...) declares its own beside its code in a
subclass of `Options` and registers itself in the `Registry` of its kind; its options exist when it is in use.
Values come in layers (preset, file, command line; later ones win); `resolve` merges them and records the origin of each.
"""

from geodl.config.layers import Effective, Layer, file_layers, preset_layer, presets, resolve
from geodl.config.options import COMMON, MANY, SECTIONS, SEEDS, Options, RunConfig
from geodl.config.plugins import import_installed, import_parts, imported
from geodl.config.registry import Registry, all_options, owners

__all__ = [
    "COMMON",
    "MANY",
    "SECTIONS",
    "SEEDS",
    "Effective",
    "Layer",
    "Options",
    "Registry",
    "RunConfig",
    "all_options",
    "file_layers",
    "import_installed",
    "import_parts",
    "imported",
    "owners",
    "preset_layer",
    "presets",
    "resolve",
]
