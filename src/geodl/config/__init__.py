"""The options of a run: one validated definition for the command line, TOML files and Python.

``RunConfig`` declares what every method has. A method's own class, in the method's file, inherits it, adds its options and
restates the defaults it wants otherwise; a distillation declares its options beside its loss, and they are there only where
it is in use. Values come in layers (preset, file, command line; later ones win) and ``resolve`` merges them, so that the
origin of every value can be told.
"""

from geodl.config.layers import Effective, Kinds, Layer, file_layers, preset_layer, presets, resolve
from geodl.config.options import MANY, SEEDS, RunConfig, derive, groups_of_options, option, restate

__all__ = [
    "MANY",
    "SEEDS",
    "Effective",
    "Kinds",
    "Layer",
    "RunConfig",
    "derive",
    "file_layers",
    "groups_of_options",
    "option",
    "preset_layer",
    "presets",
    "resolve",
    "restate",
]
