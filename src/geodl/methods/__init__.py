"""The methods, one file each; importing the package registers them all."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from geodl.config import Effective, Kinds, Layer, RunConfig, resolve
from geodl.losses import DISTILLATIONS
from geodl.methods.base import METHODS, Losses, Method, Phase, Schedule, Stage, register

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["METHODS", "Losses", "Method", "Phase", "Schedule", "Stage", "build", "configure", "register"]


def configure(layers: Sequence[Layer]) -> Effective:
    """Merge layers of options into the configuration of the method they name."""
    return resolve(layers, kinds())


def kinds() -> Kinds:
    """Return the classes of options of all methods and distillations."""
    return Kinds(
        {name: method.Config for name, method in METHODS.items()},
        {name: distillation.Options for name, distillation in DISTILLATIONS.items()},
    )


def build(config: RunConfig) -> Method:
    """Return the method that a configuration names."""
    return METHODS[config.method](config)


def stored_config(values: Mapping[str, Any]) -> RunConfig:
    """Return a configuration as it was stored with a state, without options that this version no longer has."""
    there = {key for kind in (*kinds().methods.values(), *kinds().distillations.values()) for key in kind.model_fields}
    known = {key: value for key, value in values.items() if key in there}
    return configure([Layer("the stored configuration", known)]).config
